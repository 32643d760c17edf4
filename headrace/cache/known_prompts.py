"""Keys of the prompts that came last: one that goes on from one of them is hashed from its end on.

A chat's next turn begins with all of the turn before it. Hashing 20,000 tokens in blocks of 16 holds the interpreter's
lock for a millisecond: of the time for which anything held it, 7 % on a node that decodes, and 11 % on a router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.cache.hashing import PrefixHasher
from headrace.cache.types import PrefixKey
from headrace.token_array import TOKEN_BYTES, TokenArray

KEPT_BYTES = 32 << 20
"""Packed tokens to keep: 400 prompts of 20,000. Keys take as much again and a quarter, where prompts share none."""

MOST_PROMPTS = 400
"""Prompts to keep: with all the short ones that fit, looking through them took ten times as long as hashing one."""

LEAST_TOKENS = 2048
"""Shorter prompts are hashed as they are, and forgotten: that takes no longer than to look through the known ones."""

_END_BYTES = 64


class _Prompt(NamedTuple):
    """One prompt's full blocks. `end` is their last bytes: nearly all that are no beginning of another differ there."""

    salt: bytes
    block_size: int
    num_bytes: int
    end: bytes
    packed: bytes
    keys: Sequence[PrefixKey]


class KnownPrompts:
    """The last prompts, the newest first: MOST_PROMPTS, and up to `kept_bytes` of tokens."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._num_bytes = 0
        self._prompts: deque[_Prompt] = deque()

    def hash(self, hasher: PrefixHasher, tokens: TokenArray, salt: bytes) -> Iterator[None]:
        """Extends a fresh hasher, made with this salt, by the tokens; some before each time it yields."""
        if len(tokens) < LEAST_TOKENS:
            yield from hasher.extend_in_parts(tokens)
            return
        known = self._beginning(tokens.packed, salt, hasher.block_size)
        if known is not None:
            hasher.begin_with(known.keys)
        num_known = 0 if known is None else known.num_bytes
        yield from hasher.extend_in_parts(tokens[num_known // TOKEN_BYTES :])
        num_bytes = len(hasher.keys) * hasher.block_size * TOKEN_BYTES
        if num_known < num_bytes:
            end = tokens.packed[num_bytes - _END_BYTES : num_bytes]
            self._keep(_Prompt(salt, hasher.block_size, num_bytes, end, tokens.packed, tuple(hasher.keys)))

    def _beginning(self, packed: bytes, salt: bytes, block_size: int) -> _Prompt | None:
        """The longest known prompt with which these tokens begin."""
        found, most = None, 0
        for prompt in self._prompts:
            num_bytes = prompt.num_bytes
            if (
                most < num_bytes <= len(packed)
                and prompt.salt == salt
                and prompt.block_size == block_size
                and packed.endswith(prompt.end, num_bytes - _END_BYTES, num_bytes)
                and packed.startswith(prompt.packed[:num_bytes])
            ):
                found, most = prompt, num_bytes
        return found

    def _keep(self, prompt: _Prompt) -> None:
        self._prompts.appendleft(prompt)
        self._num_bytes += len(prompt.packed)
        while self._num_bytes > self._kept_bytes or len(self._prompts) > MOST_PROMPTS:
            self._num_bytes -= len(self._prompts.pop().packed)
