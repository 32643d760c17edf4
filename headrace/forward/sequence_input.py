"""One sequence's part of an engine step: a pure value between engine and runner."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceInput:
    """The tokens to process of one sequence, and where its cache is read and written.

    The state before tokens[0] is read from `src_slot` (None: a fresh zero state), the state after the last
    token goes to `dst_slot`. They are the same only when the sequence owns the slot; otherwise the source's
    bytes stay as they are.
    """

    tokens: Sequence[int]  # at least one
    start: int  # absolute position of tokens[0]; the tokens before it are in blocks and state
    block_ids: Sequence[int]  # in order, covering start + len(tokens) tokens or more; a list may grow, never change
    src_slot: int | None
    dst_slot: int
    emit: tuple[tuple[int, int], ...] = ()  # (num_tokens, slot): also write the state after num_tokens tokens
    num_logits: int = 1  # 0, 1 (after the last token) or len(tokens)
    future_token: int | None = None  # tokens[0] stands in for the token with this index among the last launch's draws
    future_drafts: int | None = None  # tokens[1:] stand in for those that the layer drafted last in this row

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a step needs at least one token")
        if self.num_logits not in (0, 1, len(self.tokens)):
            raise ValueError(f"num_logits {self.num_logits} is not 0, 1 or {len(self.tokens)}")
        if self.future_token is not None and not self.is_decode:
            raise ValueError(f"{len(self.tokens)} tokens, one still to be drawn: only the newest can be unknown")
        if self.start < 0 or (self.src_slot is None) != (self.start == 0):
            raise ValueError(f"start {self.start} with src_slot {self.src_slot}: a fresh state is one at start 0")
        for num_tokens, _ in self.emit:
            if not self.start < num_tokens < self.end:
                raise ValueError(f"emit at {num_tokens} is not inside ({self.start}, {self.end})")

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """True for one new token: a decode, or a prefill whose rest is as short."""
        return len(self.tokens) == 1

    @property
    def has_drafts(self) -> bool:
        """True for a new token and drafts behind it: logits of every row, and the state after each has a slot."""
        return 1 < len(self.tokens) == self.num_logits == len(self.emit) + 1


def written_slots(entry: SequenceInput) -> list[int]:
    """The slots that the states after its tokens go to, in order, if it has drafts or a single token."""
    return [*(slot for _, slot in entry.emit), entry.dst_slot]
