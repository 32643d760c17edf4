"""The plan of a transfer: its messages, computed by both sides from the same few numbers.

The plan does not travel: both sides compute it from the Reservation, and each message's envelope must agree with the
receiver's own plan in every number.

Legend    N blocks, B bytes of a block, S bytes of the state. A message is N * B bytes of blocks, ascending, then S
          bytes of the state if it carries it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from transfer.protocol.errors import LayoutMismatch

NONCE_BITS = 48
MAX_MESSAGES = 1 << 15
"""A message's index has 15 bits in its tag; see `transfer.protocol.envelope.Tag`."""


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One payload: `num_blocks` attention blocks from `first_block` of the prompt, then, in the last, the whole state.

    attention_bytes   of its blocks
    state_bytes       of the state; 0 where it is not carried
    sendable_tokens   prompt tokens that must be computed before the payload can be packed
    """

    index: int
    first_block: int
    num_blocks: int
    attention_bytes: int
    state_bytes: int
    sendable_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.attention_bytes + self.state_bytes


@dataclass(frozen=True)
class TransferPlan:
    """The ordered messages of a session: the attention blocks that the receiver lacks, then the state.

    nonce               of the Reservation: 48 random bits, never 0; it alone identifies the session
    num_tokens          the whole prompt; its last block may be partial and moves as a whole block
    first_block         the receiver's attention hit in blocks: blocks below it do not move
    block_size          tokens a block; block_bytes its bytes, all attention layers
    state_bytes         the whole state of one request, all state layers
    max_message_bytes   blocks are packed up to this, and the state with the last of them if it fits; else the state
                        is a message of its own, whatever its size

    Raises `LayoutMismatch` when the numbers do not make a plan.
    """

    nonce: int
    num_tokens: int
    first_block: int
    block_size: int
    block_bytes: int
    state_bytes: int
    max_message_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.nonce < 1 << NONCE_BITS:
            raise LayoutMismatch(f"nonce {self.nonce:#x} is not in 1..2^{NONCE_BITS}-1: take `new_nonce()`")
        for name in ("num_tokens", "block_size", "block_bytes", "state_bytes", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise LayoutMismatch(f"{name} {getattr(self, name)} < 1: both sides must know their layout")
        if not 0 <= self.first_block <= self.num_blocks:
            raise LayoutMismatch(
                f"first_block {self.first_block} is not in 0..{self.num_blocks}, the blocks of "
                f"{self.num_tokens} tokens: report the attention hit of this prompt, in blocks of "
                f"{self.block_size}"
            )
        if self.block_bytes > self.max_message_bytes:
            raise LayoutMismatch(
                f"max_message_bytes {self.max_message_bytes} < block_bytes {self.block_bytes}: "
                "raise max_message_bytes to hold at least one block"
            )
        if len(self._first_blocks) > MAX_MESSAGES:
            raise LayoutMismatch(
                f"{len(self._first_blocks)} messages > {MAX_MESSAGES}: raise max_message_bytes "
                f"{self.max_message_bytes}, or admit shorter prompts than {self.num_tokens} tokens"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt, a partial last one included."""
        return -(-self.num_tokens // self.block_size)

    @property
    def attention_blocks(self) -> int:
        """Blocks that move."""
        return self.num_blocks - self.first_block

    @property
    def attention_tokens(self) -> int:
        """Prompt tokens whose attention KV moves."""
        return max(0, self.num_tokens - self.first_block * self.block_size)

    @property
    def attention_bytes(self) -> int:
        return self.attention_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.attention_bytes + self.state_bytes

    @property
    def largest_message_bytes(self) -> int:
        """The smallest staging buffer for this plan."""
        return max(message.num_bytes for message in self.messages)

    @cached_property
    def messages(self) -> tuple[PlannedMessage, ...]:
        """By ascending block; the last one carries the state. `messages[i].index == i`."""
        return tuple(self._messages())

    @property
    def _blocks_per_message(self) -> int:
        return self.max_message_bytes // self.block_bytes

    @property
    def _first_blocks(self) -> Sequence[int]:
        """First block of each message. The last blocks and the state become ready together, and a message costs both
        ends more than its bytes do: they share a message where one buffer holds both."""
        starts = range(self.first_block, self.num_blocks, self._blocks_per_message)
        if starts and (self.num_blocks - starts[-1]) * self.block_bytes + self.state_bytes <= self.max_message_bytes:
            return starts
        return [*starts, self.num_blocks]

    def _messages(self) -> Iterator[PlannedMessage]:
        starts = self._first_blocks
        for index, (start, end) in enumerate(zip_longest(starts, starts[1:], fillvalue=self.num_blocks)):
            yield PlannedMessage(
                index=index,
                first_block=start,
                num_blocks=end - start,
                attention_bytes=(end - start) * self.block_bytes,
                state_bytes=0 if index < len(starts) - 1 else self.state_bytes,
                sendable_tokens=min(end * self.block_size, self.num_tokens),
            )
