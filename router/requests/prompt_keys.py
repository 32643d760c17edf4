"""The prefix keys of a request's prompt, hashed once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from headrace.cache.hashing import PrefixHasher
from headrace.cache.known_prompts import KnownPrompts
from headrace.cache.types import PrefixKey
from headrace.request import Request


class PromptKeys:
    """The prefix keys of one request by block size, hashed on first use and cached.

    Concurrent callers wait for one hashing instead of repeating it. A long prompt is hashed in parts, between which the
    event loop does other work: a thread would hold the interpreter's lock all the while.
    """

    def __init__(self) -> None:
        self._hashing = asyncio.Lock()
        self._num_tokens = 0
        self._keys: dict[int, Sequence[PrefixKey]] = {}

    async def of(
        self, request: Request, block_sizes: Iterable[int], known: KnownPrompts
    ) -> Mapping[int, Sequence[PrefixKey]]:
        """Keys of `request.tokens`; cached until a migration appends tokens. What `known` has is not hashed again."""
        tokens = request.tokens
        async with self._hashing:
            if len(tokens) != self._num_tokens:
                self._num_tokens, self._keys = len(tokens), {}
            for size in set(block_sizes) - self._keys.keys():
                hasher = PrefixHasher(size, request.salt)
                for _ in known.hash(hasher, tokens, request.salt):
                    await asyncio.sleep(0)
                self._keys[size] = hasher.keys
            return self._keys
