"""Prefixes that nodes will hold soon: of prompts that are being computed, and of answers whose events are on their way.

A router that counted only what is cached already would compute one system prompt on every node, if requests with it
arrive together. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey

Place = tuple[int, PrefixKey]
"""A position, in blocks, and the key of the prefix that ends there."""


class ComingHits:
    """Places where nodes will have a checkpoint, and the blocks before it.

    ttl_s   for how long a place counts after its work is done: until the node's own report of it arrives
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._nodes: dict[int, dict[PrefixKey, dict[str, int]]] = {}  # by position and key: expectations of each node
        self._expected: dict[int, tuple[str, tuple[Place, ...]]] = {}
        self._expiring: deque[tuple[float, str, tuple[Place, ...]]] = deque()

    def expect(self, number: int, node: str, places: Iterable[Place]) -> None:
        """A request with this number will leave checkpoints there."""
        listed = tuple(places)
        self._expected[number] = (node, listed)
        self._count(node, listed, 1)

    def computed(self, number: int, now_s: float) -> None:
        """The checkpoints are there, and the node's report of them is on its way."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._expiring.append((now_s + self._ttl_s, *expected))

    def given_up(self, number: int) -> None:
        """The request does not compute them after all."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._count(*expected, -1)

    def match(self, keys: Sequence[PrefixKey], max_blocks: int, now_s: float) -> Mapping[str, int]:
        """The position, in blocks, of the deepest place of this prompt that each node will have."""
        self._expire(now_s)
        limit = min(len(keys), max_blocks)
        found = [
            (position, nodes)
            for position, at_position in self._nodes.items()
            if position <= limit and (nodes := at_position.get(keys[position - 1])) is not None
        ]
        deepest: dict[str, int] = {}
        for position, nodes in sorted(found, key=itemgetter(0)):
            deepest.update(dict.fromkeys(nodes, position))
        return deepest

    def forget(self, node: str) -> None:
        """The node is gone."""
        for number in [number for number, (name, _) in self._expected.items() if name == node]:
            self.given_up(number)
        kept = deque(entry for entry in self._expiring if entry[1] != node)
        for _, name, places in self._expiring:
            if name == node:
                self._count(name, places, -1)
        self._expiring = kept

    def _expire(self, now_s: float) -> None:
        while self._expiring and self._expiring[0][0] <= now_s:
            _, node, places = self._expiring.popleft()
            self._count(node, places, -1)

    def _count(self, node: str, places: Iterable[Place], change: int) -> None:
        for position, key in places:
            at_position = self._nodes.setdefault(position, {})
            nodes = at_position.setdefault(key, {})
            nodes[node] = nodes.get(node, 0) + change
            if not nodes[node]:
                del nodes[node]
            if not nodes:
                del at_position[key]
            if not at_position:
                del self._nodes[position]


def with_coming(hit: PrefixHit, coming_tokens: int) -> PrefixHit:
    """The hit once the node has a checkpoint at `coming_tokens`, and the blocks before it."""
    if coming_tokens <= hit.resumable_tokens:
        return hit
    return PrefixHit(max(hit.attention_tokens, coming_tokens), max(hit.state_tokens, coming_tokens), coming_tokens)
