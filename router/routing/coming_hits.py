"""Prefixes that nodes will hold soon: of prompts that are being computed, and of answers whose events are on their way.

A router that counted only what is cached already would compute one system prompt on every node, if requests with it
arrive together. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey


class _Expected(NamedTuple):
    """Places of one prompt where a node will have checkpoints: positions, in blocks, and the keys of what ends there.

    first   key of the prompt's first block: prompts that begin with another share none of the places
    """

    node: str
    first: PrefixKey
    places: Sequence[tuple[int, PrefixKey]]


class ComingHits:
    """Places where nodes will have a checkpoint, and the blocks before it.

    ttl_s   for how long a place counts after its work is done: until the node's own report of it arrives
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        # By the prompt's first key, position and key: expectations of each node.
        self._nodes: dict[PrefixKey, dict[int, dict[PrefixKey, dict[str, int]]]] = {}
        self._expected: dict[int, _Expected] = {}
        self._expiring: deque[tuple[float, _Expected]] = deque()

    def expect(self, number: int, node: str, keys: Sequence[PrefixKey], positions: Iterable[int]) -> None:
        """A request with this number will leave checkpoints at these positions of its prompt."""
        places = tuple((position, keys[position - 1]) for position in positions)
        if places:
            expected = self._expected[number] = _Expected(node, keys[0], places)
            self._count(expected, 1)

    def computed(self, number: int, now_s: float) -> None:
        """The checkpoints are there, and the node's report of them is on its way."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._expiring.append((now_s + self._ttl_s, expected))

    def given_up(self, number: int) -> None:
        """The request does not compute them after all."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._count(expected, -1)

    def match(self, keys: Sequence[PrefixKey], max_blocks: int, now_s: float) -> Mapping[str, int]:
        """The position, in blocks, of the deepest place of this prompt that each node will have."""
        self._expire(now_s)
        limit = min(len(keys), max_blocks)
        if not limit:
            return {}
        found = [
            (position, nodes)
            for position, at_position in self._nodes.get(keys[0], {}).items()
            if position <= limit and (nodes := at_position.get(keys[position - 1])) is not None
        ]
        deepest: dict[str, int] = {}
        for position, nodes in sorted(found, key=itemgetter(0)):
            deepest.update(dict.fromkeys(nodes, position))
        return deepest

    def forget(self, node: str) -> None:
        """The node is gone."""
        for number in [number for number, expected in self._expected.items() if expected.node == node]:
            self.given_up(number)
        for _, expected in self._expiring:
            if expected.node == node:
                self._count(expected, -1)
        self._expiring = deque(entry for entry in self._expiring if entry[1].node != node)

    def _expire(self, now_s: float) -> None:
        while self._expiring and self._expiring[0][0] <= now_s:
            self._count(self._expiring.popleft()[1], -1)

    def _count(self, expected: _Expected, change: int) -> None:
        node, first, places = expected
        by_position = self._nodes.setdefault(first, {})
        for position, key in places:
            at_position = by_position.setdefault(position, {})
            nodes = at_position.setdefault(key, {})
            nodes[node] = nodes.get(node, 0) + change
            if not nodes[node]:
                del nodes[node]
            if not nodes:
                del at_position[key]
            if not at_position:
                del by_position[position]
        if not by_position:
            del self._nodes[first]


def with_coming(hit: PrefixHit, coming_tokens: int) -> PrefixHit:
    """The hit once the node has a checkpoint at `coming_tokens`, and the blocks before it."""
    if coming_tokens <= hit.resumable_tokens:
        return hit
    return PrefixHit(max(hit.attention_tokens, coming_tokens), max(hit.state_tokens, coming_tokens), coming_tokens)
