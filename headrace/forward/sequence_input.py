"""One sequence's part of an engine step: a pure value between engine and runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import BehindCheck, Tail
from headrace.kernels.lib.tails import TailField


@dataclass(slots=True)
class SequenceInput:
    """The tokens to process of one sequence, and where its cache is read and written.

    The state before tokens[0] is read from `src_slot` (None: a fresh zero state), the state after the last
    token goes to `dst_slot`. They are the same only when the sequence owns the slot; otherwise the source's
    bytes stay as they are.

    With a `tail`, `src_slot` has the state at its base, and `dst_slot` gets the one that the step writes, if any.
    Models with tails decode without one as if they began one: the row is the one with the number of `dst_slot`.

    `behind` a check, all of it lies further on by as many tokens as that accepts drafts, and `future_token` is the
    draw behind that check's newest token: those behind its drafts follow. `tail` is the one before that check, and a
    state is written where the step turns out to reach a place for one.

    Nobody changes one. It is not frozen, as a step makes one for each sequence: that would take three times as long.
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
    is_prompt: bool = False  # of a prompt, or computed again: not a decode, even if it is one token
    tail: Tail | None = None  # of a decode; None: it has none, or the model keeps no tails
    behind: BehindCheck | None = None
    # Asked many times in a step, so each is found once.
    is_decode: bool = field(init=False)  # one new token of an answer
    has_drafts: bool = field(init=False)  # all rows with logits, and a tail, or slots for the states
    end: int = field(init=False)
    end_at_most: int = field(init=False)  # end of its tokens if all drafts before them are accepted

    def __post_init__(self) -> None:
        num_tokens = len(self.tokens)
        if not num_tokens:
            raise ValueError("a step needs at least one token")
        if self.num_logits not in (0, 1, num_tokens):
            raise ValueError(f"num_logits {self.num_logits} is not 0, 1 or {num_tokens}")
        self.end = self.end_at_most = self.start + num_tokens
        if self.behind is not None:
            self.end_at_most += self.behind.num_drafts
        self.is_decode = num_tokens == 1 and not self.is_prompt
        is_checked = num_tokens > 1 and self.num_logits == num_tokens and not self.is_prompt
        self.has_drafts = is_checked and (self.tail is not None or len(self.emit) == num_tokens - 1)
        if self.future_token is not None and not (self.is_decode or self.has_drafts):
            raise ValueError(f"{num_tokens} tokens, one still to be drawn: only the newest can be unknown")
        if self.behind is not None and (self.future_token is None or self.tail is None):
            raise ValueError("behind a check the newest token is one of its draws, and the sequence has a tail")
        if self.start < 0 or (self.src_slot is None) != (self.start == 0):
            raise ValueError(f"start {self.start} with src_slot {self.src_slot}: a fresh state is one at start 0")
        for position, _ in self.emit:
            if not self.start < position < self.end:
                raise ValueError(f"emit at {position} is not inside ({self.start}, {self.end})")


def known_place(entry: SequenceInput, num_accepted: int, interval: int) -> SequenceInput:
    """The input of a sequence behind a check that accepts `num_accepted` drafts; a state is written each `interval`
    tokens."""
    behind, tail = entry.behind, entry.tail
    assert behind is not None and tail is not None
    start, src_slot, base = entry.start + num_accepted, entry.src_slot, tail.base
    if behind.base is not None and behind.base <= start:
        src_slot, base = behind.slot, behind.base
    step = Tail(tail.row, base).step(ChunkSpan(start, start + len(entry.tokens)), interval)
    return replace(entry, start=start, src_slot=src_slot, tail=step, behind=None)


def written_slots(entry: SequenceInput) -> list[int]:
    """The slots of the states after each of its tokens, if it is a decode or has drafts; -1: none is written."""
    if entry.tail is not None:
        return [-1] * (len(entry.tokens) - 1) + [entry.dst_slot]
    return [*(slot for _, slot in entry.emit), entry.dst_slot]


def tail_fields(inputs: Sequence[SequenceInput], num_places: int) -> np.ndarray:
    """The numbers of decodes' tails, in a ring with so many places a row: int32 [len(inputs), a `TailField` each]."""
    fields = np.empty((len(inputs), len(TailField)), dtype=np.int32)
    tails = [entry.tail or Tail(entry.dst_slot, entry.start, entry.end) for entry in inputs]
    pairs = list(zip(inputs, tails, strict=True))
    base = np.array([tail.base for tail in tails], dtype=np.int32)
    fields[:, TailField.SRC] = [-1 if entry.src_slot is None else entry.src_slot for entry in inputs]
    fields[:, TailField.DST] = [-1 if tail.written is None else entry.dst_slot for entry, tail in pairs]
    fields[:, TailField.ROW] = [tail.row for tail in tails]
    fields[:, TailField.START] = base % num_places
    fields[:, TailField.KEPT] = np.array([entry.start for entry in inputs], dtype=np.int32) - base
    fields[:, TailField.WRITTEN] = [0 if tail.written is None else tail.written - tail.base for tail in tails]
    return fields
