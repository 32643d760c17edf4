"""Checkpoint policies: at which block boundaries of a prompt and of its answer a state is kept.

Positions count tokens: a checkpoint at `n` is the state after the first `n` tokens. The chunked kernels have
the states at every boundary in hand, so a policy costs slots, not forward passes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from headrace.cache.errors import UnknownCheckpointPolicy
from headrace.cache.types import PRIMARY, Tier

T = TypeVar("T")


class ChunkSpan(NamedTuple):
    """One sequence's tokens of a step: it computes `start` .. `end - 1`. A tuple, as a step makes one for each."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position whose state is to be kept, and its tier: lower tiers are evicted first."""

    num_tokens: int
    tier: Tier = PRIMARY


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """The facts of a prompt that a policy may use.

    num_tokens   its length
    block_size   tokens a block
    hints        the router's boundaries (end of the system prompt, of each message), in tokens, unaligned
    branch_point where the prompt left a known prefix that had no checkpoint (`Claim.branch_point`)
    """

    num_tokens: int
    block_size: int
    hints: tuple[int, ...] = ()
    branch_point: int | None = None

    @property
    def last_boundary(self) -> int:
        """The last position from which the same prompt can resume: at least one token is always computed."""
        return (self.num_tokens - 1) // self.block_size * self.block_size


def by_need(boundaries: Sequence[Boundary]) -> list[Boundary]:
    """The order in which ascending boundaries of one chunk get slots when there are not enough.

    Higher tiers first; within a tier the last boundary, where the next turn resumes, and then the shallow ones, which
    other prompts are likelier to share.
    """
    return sorted((*boundaries[-1:], *boundaries[:-1]), key=lambda boundary: -boundary.tier)


class CheckpointPolicy(Protocol):
    """Which states are worth a slot."""

    @property
    def name(self) -> str: ...

    def prompt_boundaries(self, span: ChunkSpan, prompt: PromptFacts) -> tuple[Boundary, ...]:
        """The boundaries to keep of a prefill chunk: ascending multiples of the block size in (start, end]."""
        ...

    def decoded_boundary(self, num_tokens: int, block_size: int) -> bool:
        """True if a running decode keeps its state after `num_tokens` tokens as a checkpoint."""
        ...

    def superseded(self, decoded: Sequence[T]) -> Sequence[T]:
        """The checkpoints to drop, among those that a request's decode left so far, when it leaves one more."""
        ...


class KeepNone:
    """No checkpoints: nothing can be resumed, attention blocks still serve transfers."""

    name = "none"

    def prompt_boundaries(self, span: ChunkSpan, prompt: PromptFacts) -> tuple[Boundary, ...]:
        return ()

    def decoded_boundary(self, num_tokens: int, block_size: int) -> bool:
        return False

    def superseded(self, decoded: Sequence[T]) -> Sequence[T]:
        return ()


class _KeepNewestDecoded:
    """Keeps only the newest boundary of the answer: that is where the next turn resumes."""

    def decoded_boundary(self, num_tokens: int, block_size: int) -> bool:
        return num_tokens % block_size == 0

    def superseded(self, decoded: Sequence[T]) -> Sequence[T]:
        return decoded


class Align(_KeepNewestDecoded):
    """The last block boundary that each prefill chunk reached, and the branch point.

    Without the branch point, prompts that share less than a whole chunk would never resume, however often they came.
    """

    name = "align"

    def prompt_boundaries(self, span: ChunkSpan, prompt: PromptFacts) -> tuple[Boundary, ...]:
        positions = {span.end // prompt.block_size * prompt.block_size}
        if prompt.branch_point is not None:
            positions.add(prompt.branch_point)
        return _primary(span, positions)


class Every:
    """Every block boundary, of the prompt and of the answer."""

    name = "every"

    def prompt_boundaries(self, span: ChunkSpan, prompt: PromptFacts) -> tuple[Boundary, ...]:
        size = prompt.block_size
        return tuple(Boundary(position) for position in range((span.start // size + 1) * size, span.end + 1, size))

    def decoded_boundary(self, num_tokens: int, block_size: int) -> bool:
        return num_tokens % block_size == 0

    def superseded(self, decoded: Sequence[T]) -> Sequence[T]:
        return ()


CHECKPOINT_GRID_TOKENS = 512


@dataclass(frozen=True)
class Branch(_KeepNewestDecoded):
    """The places where prompts are likely to part: the last boundary, the router's hints, and the branch point.

    Between these primary checkpoints stands a grid of others, for prompts that part somewhere else. Each grid position
    has the tier of the largest power of two that divides its number: when slots get scarce, every second grid
    checkpoint is evicted, then every second one of those left. So with many slots the grid is as fine as `every`, and
    with few it costs the primary checkpoints nothing.
    """

    checkpoint_grid_tokens: int = CHECKPOINT_GRID_TOKENS
    name = "branch"

    def prompt_boundaries(self, span: ChunkSpan, prompt: PromptFacts) -> tuple[Boundary, ...]:
        size = prompt.block_size
        positions = {prompt.last_boundary}
        positions.update(hint // size * size for hint in prompt.hints)
        if prompt.branch_point is not None:
            positions.add(prompt.branch_point)
        primary = _primary(span, positions)
        step = max(self.checkpoint_grid_tokens // size, 1) * size
        last = min(span.end, prompt.last_boundary)
        grid = (
            Boundary(number * step, _grid_tier(number))
            for number in range(span.start // step + 1, last // step + 1)
            if number * step not in positions
        )
        return tuple(sorted((*primary, *grid), key=lambda boundary: boundary.num_tokens))


def _grid_tier(number: int) -> Tier:
    """0 for odd numbers, 1 for twice an odd number and so on, below PRIMARY."""
    return Tier(min((number & -number).bit_length(), PRIMARY) - 1)


def _primary(span: ChunkSpan, positions: Iterable[int]) -> tuple[Boundary, ...]:
    return tuple(Boundary(position) for position in sorted(positions) if span.start < position <= span.end)


CHECKPOINT_POLICIES = (KeepNone.name, Align.name, Every.name, Branch.name)
"""The names that `checkpoint_policy` knows."""

DEFAULT_CHECKPOINT_POLICY = Branch.name


def checkpoint_policy(
    name: str = DEFAULT_CHECKPOINT_POLICY, checkpoint_grid_tokens: int = CHECKPOINT_GRID_TOKENS
) -> CheckpointPolicy:
    """The policy called `name`. Raises UnknownCheckpointPolicy, listing the known ones."""
    policies: tuple[CheckpointPolicy, ...] = (KeepNone(), Align(), Every(), Branch(checkpoint_grid_tokens))
    for policy in policies:
        if policy.name == name:
            return policy
    raise UnknownCheckpointPolicy(f"checkpoint policy {name!r} is unknown: use one of {', '.join(CHECKPOINT_POLICIES)}")
