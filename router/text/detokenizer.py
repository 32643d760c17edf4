"""Tokens of a byte-level BPE to text, one at a time, whole characters only.

Every token stands for bytes, so a token may end in the middle of a character. The bytes go through an
incremental UTF-8 decoder: O(length of the token), whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence


def byte_of_char() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = byte_of_char()


def bytes_of_token(token: str) -> bytes:
    """The bytes of a vocabulary entry; an added token with other characters is taken as it is written."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


class TokenBytes:
    """Bytes of every token id. Special tokens have none in text; ids without an entry (padding) neither."""

    def __init__(self, vocabulary: Mapping[str, int], special_ids: Sequence[int]) -> None:
        self._written = {number: bytes_of_token(token) for token, number in vocabulary.items()}
        special = frozenset(special_ids)
        self._in_text = {n: data for n, data in self._written.items() if n not in special}

    def in_text(self, token_id: int) -> bytes:
        """What the token adds to a text."""
        return self._in_text.get(token_id, b"")

    def written(self, token_id: int) -> bytes:
        """What the token is called in logprobs: special tokens by their name."""
        return self._written.get(token_id, b"")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all of them; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.in_text, tokens)).decode(errors="replace")


class Detokenizer:
    """One text in the making. The deltas that `push` and `finish` return join to `TokenBytes.decode`."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._token_bytes.in_text(token_id))

    def finish(self) -> str:
        """What an unfinished character at the end becomes."""
        return self._decoder.decode(b"", final=True)
