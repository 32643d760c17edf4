"""The prefix keys of a request's prompt, hashed once and, for long prompts, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from headrace.cache.hashing import prefix_keys
from headrace.cache.types import PrefixKey
from headrace.request import Request

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
