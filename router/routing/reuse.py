"""Reuse distances: how much else is used between two uses of a prefix, and so the miss ratios of caches. Pure.

A cache that evicts by recency keeps a prefix until as many other tokens as it holds have been used, so one pass over
the requests says what caches of all sizes would have missed (stack distances: Mattson et al., 1970). A sample of the
blocks is followed, chosen by their keys: each use of a prefix counts the same ones (SHARDS: Waldspurger et al., FAST
2015).
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
"""Last uses are counted by generations, not one by one: each ends with so many samples, or when so many requests have
ended. So distances are right to within a generation."""
MOST_SAMPLES = 1 << 17
MOST_GENERATIONS = 4096
"""Followed at once: samples of 134 million tokens, some 30 MB. What was last used before them counts as new."""
MOST_MISSES = 1.1
"""Misses of a part of the caches, as a multiple of those of all of them, above which that part is short: elastic roles
are worth about so much more work."""
MOST_UNDER_WAY = 1.5
"""Requests under way, as a multiple of those that a part of the caches holds, above which that part is short: below it
the others wait for their turn at other nodes anyhow. Measured on simulated chats (docs/routing.md)."""
STATES_HANDED_OVER = 1.6
STATES_ALONE = 1.15
"""Slots for each request whose state is kept, on nodes to which prompts are handed over and on those that compute their
own. The first need more: requests hold a slot there while another node computes their prompt. Measured on simulated
chats (docs/routing.md)."""
RECENT_REQUESTS = 256
"""Requests from which the curve is made."""
REQUESTS_A_CURVE = 8
"""Requests that begin, or end, after which the curve is made anew."""


class Reuse(NamedTuple):
    """Samples of one prompt with the same last use, and their distance from it.

    tokens    others used so many since; 0 while a request under way uses the samples, infinite without an earlier use
    requests  have ended since, or are under way; 0 or infinite likewise
    """

    num_samples: int
    tokens: float
    requests: float


class CacheSize(NamedTuple):
    """Room of one node's cache, or of several.

    tokens     for which there are blocks
    states     for which there are slots: checkpoints and running requests
    requests   that can run at once: packed checkpoints have slots of their own, which these cannot take
    """

    tokens: int
    states: int
    requests: int

    @classmethod
    def of(cls, node: NodeInfo) -> CacheSize:
        num_states = node.num_slots + node.num_packed_slots
        return cls(node.num_blocks * node.layout.block_size, num_states, node.num_slots)


@dataclass(frozen=True)
class MissRatioCurve:
    """Misses of the last requests in caches of any size: share of their tokens that is computed, not found.

    tokens_under_way, requests_under_way   when the curve was made; tokens that prompts share count once
    """

    reuses: Sequence[Reuse] = ()
    tokens_under_way: int = 0
    requests_under_way: int = 0

    def is_short(self, part: CacheSize, whole: CacheSize) -> bool:
        """True if this part of the caches, to which prompts are handed over, has no room for the requests under way, or
        misses much that the whole would keep."""
        if self.tokens_under_way > MOST_UNDER_WAY * part.tokens:
            return True
        if self.requests_under_way > MOST_UNDER_WAY * part.requests:
            return True
        missed = self.miss_ratio(part.tokens, part.states / STATES_HANDED_OVER)
        return missed > MOST_MISSES * self.miss_ratio(whole.tokens, whole.states / STATES_ALONE)

    def miss_ratio(self, cache_tokens: float, cache_requests: float) -> float:
        """The miss ratio where blocks of so many tokens and states of so many requests are kept; 0 while nothing is
        known."""
        missed = total = 0
        for num_samples, tokens, requests in self.reuses:
            total += num_samples
            if tokens > cache_tokens or requests > cache_requests:
                missed += num_samples
        return missed / total if total else 0.0


NOTHING_KNOWN = MissRatioCurve()


class Reuses:
    """Uses of prefixes by the requests that a router sends, and the curve of the last ones.

    What requests under way use is in use at their nodes, too: nothing evicts it, so that others find it in any cache,
    and it is last used when they end.
    """

    def __init__(self) -> None:
        self.curve = NOTHING_KNOWN
        self._in_use: dict[int, Sequence[PrefixKey]] = {}  # by request
        self._users: Counter[PrefixKey] = Counter()
        self._generation_of: OrderedDict[PrefixKey, int] = OrderedDict()  # in the order of their last uses
        self._generations: deque[_Generation] = deque((_Generation(0),))
        self._newest = 0
        self._sample_tokens = 0
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
        self._sample_tokens = sample_tokens
        if self._num_begun % REQUESTS_A_CURVE == 0:
            self._draw([reuse for reuses in self._recent for reuse in reuses])

    def ended(self, number: int) -> None:
        """Nothing uses the request's prefix any more, if no other does. One that did not begin here does not count."""
        if (samples := self._in_use.pop(number, None)) is None:
            return
        newest = self._generations[-1]
        for key in samples:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._generation_of[key] = self._newest
                newest.num_samples += 1
        self._num_ended += 1
        if self._num_ended % REQUESTS_A_CURVE == 0:  # or a crowd would be under way until others come
            self._draw(self.curve.reuses)
        num_requests = self._num_ended - newest.first_request
        if newest.num_samples >= SAMPLES_A_GENERATION or num_requests >= REQUESTS_A_GENERATION:
            self._generations.append(_Generation(self._num_ended))
            self._newest += 1
            self._forget()

    def _draw(self, reuses: Sequence[Reuse]) -> None:
        self.curve = MissRatioCurve(reuses, len(self._users) * self._sample_tokens, len(self._in_use))

    def _taken(self, key: PrefixKey) -> int | None:
        """The generation of a sample, which leaves it; None: it has none."""
        generation = self._generation_of.pop(key, None)
        if generation is not None:
            self._generations[generation - self._newest - 1].num_samples -= 1
        return generation

    def _reuse(self, count: int, sample_tokens: int, generation: int | None) -> Reuse:
        """So many samples, last used in this generation: amid its samples, and amid its requests."""
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
