"""The choice of a node to fetch from. Pure, except that long prompts are hashed in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire.messages import FetchSource, NodeInfo

LONG_PROMPT_TOKENS = 1 << 14  # hashed in a millisecond; longer prompts would block the event loop


class PromptKeys:
    """The prefix keys of one request by block size, hashed on first use and cached.

    Concurrent callers wait for one hashing instead of repeating it.
    """

    def __init__(self) -> None:
        self._hashing = asyncio.Lock()
        self._num_tokens = 0
        self._keys: dict[int, Sequence[PrefixKey]] = {}

    async def of(self, request: Request, block_sizes: Iterable[int]) -> Mapping[int, Sequence[PrefixKey]]:
        """Keys of `request.tokens`; cached until a migration appends tokens."""
        tokens = request.tokens
        async with self._hashing:
            if len(tokens) != self._num_tokens:
                self._num_tokens, self._keys = len(tokens), {}
            for size in set(block_sizes) - self._keys.keys():
                if len(tokens) < LONG_PROMPT_TOKENS:
                    self._keys[size] = prefix_keys(tokens, size, request.salt)
                else:
                    self._keys[size] = await asyncio.to_thread(prefix_keys, tokens, size, request.salt)
            return self._keys


def choose_fetch_source(held: Sequence[tuple[NodeInfo, PrefixHit]], own: PrefixHit | None) -> FetchSource | None:
    """The node with the prompt's deepest checkpoint; None if the prefill node has one as deep.

    held   hits of the other nodes
    own    the prefill node's hit; None: not known
    """
    info, hit = max(held, key=lambda each: each[1].state_tokens, default=(None, None))
    if info is None or hit is None or hit.state_tokens <= (0 if own is None else own.resumable_tokens):
        return None
    return FetchSource(info.name, info.address, hit.state_tokens, info.layout.block_size)
