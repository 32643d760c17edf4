"""Which cached block or checkpoint goes first when room is needed: one policy object over both pools.

Blocks go by recency under every policy. They come in chains that lose their suffix first, each saves about
the same work per byte, and a chain is worth nothing without its start.

Checkpoints go tier by tier: spare ones (`headrace.cache.types.FIRM`) before all others, the densest grid first, each
tier by recency. What is asked of the policy is the worth of a firm checkpoint. Within the tier the order is
that of GreedyDual (Young 1994; Cao and Irani 1997): an id enters with the priority `clock + worth`, the
lowest priority goes, and the clock moves on to it. So what is worth nothing to anybody ages whatever it would
save, and with equal worths the order is plain recency. Worths are rounded to powers of two: then an id
enters at the end of its worth's queue, and the next to go is the lowest of a few queue heads, O(1).

The FLOP-aware worth is the idea of Marconi (Pan et al., MLSys 2025): the work that a checkpoint saves for
its bytes. All states of a model have one size, so the bytes cancel out.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace.cache.errors import UnknownEvictionPolicy
from headrace.cache.types import FIRM, Tier

Id = TypeVar("Id", bound=int)


class Rank(NamedTuple):
    """Why an id stays: a lower tier goes before a higher one, within a tier see the module's text."""

    tier: Tier
    worth: float


class EvictionOrder(Protocol[Id]):
    """The unused ids of a pool, in the order in which they go. Every operation but iteration is O(1)."""

    def __contains__(self, id_: Id) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Id]:
        """The next to go first."""
        ...

    def add(self, id_: Id) -> None:
        """It has been used just now, and nobody uses it any more."""
        ...

    def remove(self, id_: Id) -> None:
        """It is used again, or gone."""
        ...

    def touch(self, id_: Id) -> None:
        """It counts as used just now."""
        ...

    def first(self, up_to: Tier = FIRM) -> Id | None:
        """The next to go among the tiers up to this one; None if there is none."""
        ...


class Recency(Generic[Id]):
    """Least recently used first; one tier."""

    def __init__(self) -> None:
        # An OrderedDict, since finding the first key of a dict is O(n) after n removals at its front.
        self._ids: OrderedDict[Id, None] = OrderedDict()

    def __contains__(self, id_: Id) -> bool:
        return id_ in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Id]:
        return iter(self._ids)

    def add(self, id_: Id) -> None:
        self._ids[id_] = None

    def remove(self, id_: Id) -> None:
        del self._ids[id_]

    def touch(self, id_: Id) -> None:
        self._ids.move_to_end(id_)

    def first(self, up_to: Tier = FIRM) -> Id | None:
        return next(iter(self._ids), None)


@dataclass(slots=True)
class _TierQueues(Generic[Id]):
    """One tier: a queue for each power of two of worth, each id with its priority; a clock."""

    clock: float = 0.0
    queues: dict[int, OrderedDict[Id, float]] = field(default_factory=dict)

    def first(self) -> tuple[float, Id] | None:
        heads = (next(iter(queue.items())) for queue in self.queues.values() if queue)
        return min(((priority, id_) for id_, priority in heads), default=None)


class Ranked(Generic[Id]):
    """By tier, then by GreedyDual. `rank` is asked when an id enters."""

    def __init__(self, rank: Callable[[Id], Rank]) -> None:
        self._rank = rank
        self._tiers: dict[Tier, _TierQueues[Id]] = {Tier(tier): _TierQueues() for tier in range(FIRM + 1)}
        self._queue_of: dict[Id, OrderedDict[Id, float]] = {}

    def __contains__(self, id_: Id) -> bool:
        return id_ in self._queue_of

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[Id]:
        for tier in self._tiers.values():
            queues = [[(priority, id_) for id_, priority in queue.items()] for queue in tier.queues.values()]
            yield from (id_ for _, id_ in heapq.merge(*queues))

    def add(self, id_: Id) -> None:
        rank = self._rank(id_)
        tier = self._tiers[rank.tier]
        exponent = math.frexp(rank.worth)[1]
        queue = tier.queues.setdefault(exponent, OrderedDict())
        queue[id_] = tier.clock + math.ldexp(1.0, exponent)
        self._queue_of[id_] = queue

    def remove(self, id_: Id) -> None:
        del self._queue_of.pop(id_)[id_]

    def touch(self, id_: Id) -> None:
        self.remove(id_)
        self.add(id_)

    def first(self, up_to: Tier = FIRM) -> Id | None:
        for number in range(up_to + 1):
            tier = self._tiers[Tier(number)]
            if (head := tier.first()) is not None:
                # Whoever asks evicts it next; until then nothing with a lower priority can come.
                tier.clock, id_ = head
                return id_
        return None


class EvictionPolicy(Protocol):
    """What firm checkpoints are worth."""

    @property
    def name(self) -> str: ...

    def worth(self, above_tokens: int, num_tokens: int) -> float:
        """Of a checkpoint at `num_tokens` when the one above it stands at `above_tokens`; above 0."""
        ...


class Lru:
    """All are worth the same: the least recently used goes first."""

    name = "lru"

    def worth(self, above_tokens: int, num_tokens: int) -> float:
        return 1.0


@dataclass(frozen=True)
class FlopAware:
    """The work that a checkpoint saves whoever resumes from it, in tokens' worth of linear layers.

    attention_tokens   position at which attending to the prefix costs a token as much as all else
    """

    attention_tokens: float = math.inf
    name = "flop_aware"

    def worth(self, above_tokens: int, num_tokens: int) -> float:
        linear = num_tokens - above_tokens
        return linear * (1 + (num_tokens + above_tokens) / (2 * self.attention_tokens))


EVICTION_POLICIES = (Lru.name, FlopAware.name)
"""The names that `eviction_policy` knows."""

DEFAULT_EVICTION_POLICY = FlopAware.name


def eviction_policy(name: str = DEFAULT_EVICTION_POLICY, attention_tokens: float = math.inf) -> EvictionPolicy:
    """The policy called `name`. Raises UnknownEvictionPolicy, listing the known ones."""
    if name == Lru.name:
        return Lru()
    if name == FlopAware.name:
        return FlopAware(attention_tokens)
    raise UnknownEvictionPolicy(f"eviction policy {name!r} is unknown: use one of {', '.join(EVICTION_POLICIES)}")
