"""Reuse distances: how much else is used between two uses of a prefix, and so what caches of any size would keep. Pure.

A cache that evicts by recency keeps a prefix until as many other tokens as it holds have been used (Mattson et al.,
1970): from the distances of some requests follows what they would find in a cache of any size. Of all blocks a sample
is followed, by their keys, so that each use of a prefix counts the same ones (SHARDS, Waldspurger et al., FAST 2015).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from headrace.cache.types import PrefixKey
from headrace.wire.node_messages import NodeInfo

EVERY_TOKENS = 64
LOW_BITS = 15
"""A sixteenth of the blocks that end at every 64th token is followed: where the key's first byte has these bits set."""
SAMPLES_A_GENERATION = 32
REQUESTS_A_GENERATION = 8
"""Samples that were last used together are a generation: of distances, the step in which they are counted. It is
complete with so many of them, or when so many requests have ended."""
MOST_SAMPLES = 1 << 17
MOST_GENERATIONS = 4096
"""Followed at once: samples of 134 million tokens, some 30 MB. What was last used before them counts as new."""
MOST_COMPUTED_ANEW = 1.1
"""Tokens of prompts that are computed where a part of the caches keeps what comes back, as a multiple of those where
all of them do, above which that part is too little: elastic roles are worth about so much more work."""
STATES_HANDED_OVER = 1.6
STATES_ALONE = 1.15
"""Slots that a node needs for each request whose state it keeps: where prompts are handed over to it, requests hold
room there while they wait elsewhere. Measured on simulated chats (docs/routing.md)."""
RECENT_REQUESTS = 256
"""So many requests make the curve."""
REQUESTS_A_CURVE = 8
"""Requests after which the curve is made anew."""


class Reuse(NamedTuple):
    """So many samples of one prompt that were used together before.

    tokens, requests   of others, between both uses; infinite if there was no use before
    """

    num_samples: int
    tokens: float
    requests: float


class CacheSize(NamedTuple):
    """Tokens for which there are blocks, and states for which there are slots."""

    tokens: int
    states: int

    @classmethod
    def of(cls, node: NodeInfo) -> CacheSize:
        """A node's. Packed checkpoints have slots of their own, beside those of running requests."""
        return cls(node.num_blocks * node.layout.block_size, node.num_slots + node.num_packed_slots)


@dataclass(frozen=True)
class ReuseCurve:
    """The reuses of recent requests, and so what they would have found in caches of any size."""

    reuses: Sequence[Reuse] = ()

    def is_too_little(self, part: CacheSize, whole: CacheSize) -> bool:
        """True if this part of the caches, the one in which answers are generated from prompts that are handed over,
        loses much that the whole would keep."""
        computed = self.computed_share(part.tokens, part.states / STATES_HANDED_OVER)
        return computed > MOST_COMPUTED_ANEW * self.computed_share(whole.tokens, whole.states / STATES_ALONE)

    def computed_share(self, cache_tokens: float, cache_requests: float) -> float:
        """Share of the prompts' tokens that is computed where blocks of so many tokens and states of so many requests
        are kept; 0 while nothing is known."""
        computed = total = 0
        for number, tokens, requests in self.reuses:
            total += number
            if tokens > cache_tokens or requests > cache_requests:
                computed += number
        return computed / total if total else 0.0


NO_REUSE = ReuseCurve()


class Reuses:
    """The prompts that a router sends, by samples of their blocks, and the curve of the last ones.

    What requests under way use is in use at their nodes, too: nothing evicts it, so that others find it in any cache,
    and it is last used when they end.
    """

    def __init__(self) -> None:
        self.curve = NO_REUSE
        self._in_use: dict[int, Sequence[PrefixKey]] = {}  # by request
        self._users: Counter[PrefixKey] = Counter()
        self._generation_of: OrderedDict[PrefixKey, int] = OrderedDict()  # in the order of their last uses
        self._generations: deque[_Generation] = deque((_Generation(0),))
        self._newest = 0
        self._num_ended = 0
        self._num_begun = 0
        self._recent: deque[Sequence[Reuse]] = deque(maxlen=RECENT_REQUESTS)

    def began(self, number: int, keys: Sequence[PrefixKey], block_size: int) -> None:
        """A request with this number is sent to some node; `keys` are its prompt's, of blocks of one size."""
        stride = max(1, EVERY_TOKENS // block_size)
        sample_tokens = stride * block_size * (LOW_BITS + 1)
        samples = [key for key in keys[stride - 1 :: stride] if key[0] & LOW_BITS == LOW_BITS]
        unused = [key for key in samples if key not in self._users]
        found = Counter(map(self._taken, unused))
        reuses = [self._reuse(count, sample_tokens, generation) for generation, count in found.items()]
        if len(unused) < len(samples):
            reuses.append(Reuse(len(samples) - len(unused), 0, 0))
        self._recent.append(reuses)
        self._users.update(samples)
        self._in_use[number] = samples
        self._num_begun += 1
        if self._num_begun % REQUESTS_A_CURVE == 0:
            self.curve = ReuseCurve([reuse for reuses in self._recent for reuse in reuses])

    def ended(self, number: int) -> None:
        """Nothing uses the request's prefix any more, if no other does."""
        newest = self._generations[-1]
        for key in self._in_use.pop(number, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._generation_of[key] = self._newest
                newest.num_samples += 1
        self._num_ended += 1
        num_requests = self._num_ended - newest.first_request
        if newest.num_samples >= SAMPLES_A_GENERATION or num_requests >= REQUESTS_A_GENERATION:
            self._generations.append(_Generation(self._num_ended))
            self._newest += 1
            self._forget()

    def _taken(self, key: PrefixKey) -> int | None:
        """The generation of a sample, which leaves it; None: it has none."""
        generation = self._generation_of.pop(key, None)
        if generation is not None:
            self._generations[generation - self._newest - 1].num_samples -= 1
        return generation

    def _reuse(self, count: int, sample_tokens: int, generation: int | None) -> Reuse:
        """So many samples, last used in this generation."""
        if generation is None:
            return Reuse(count, math.inf, math.inf)
        age = self._newest - generation
        *later, its_own = islice(reversed(self._generations), age + 1)
        samples = len(self._users) + sum(each.num_samples for each in later) + its_own.num_samples / 2
        last_request = later[-1].first_request if later else self._num_ended
        requests = len(self._in_use) + self._num_ended - (its_own.first_request + last_request) / 2
        return Reuse(count, samples * sample_tokens, requests)

    def _forget(self) -> None:
        """Drops what was last used before all that may be followed, and generations of which nothing is left."""
        generations, samples = self._generations, self._generation_of
        while len(generations) > 1 and (
            not generations[0].num_samples or len(generations) > MOST_GENERATIONS or len(samples) > MOST_SAMPLES
        ):
            for _ in range(generations.popleft().num_samples):
                samples.popitem(last=False)


@dataclass(slots=True)
class _Generation:
    """Samples whose last uses came together, the first of them when so many requests had ended."""

    first_request: int
    num_samples: int = 0
