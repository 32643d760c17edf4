"""The bytes that each token stands for in a text, as logprobs report them."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # for bytes that are not UTF-8, or not yet


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_BYTE_OF_FALLBACK_TOKEN = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def bytes_of_byte_level(token: str) -> bytes:
    """The bytes of a byte-level vocabulary entry; an added token with other characters stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


class TokenBytes:
    """Bytes of the tokens of one tokenizer. `decoders` are the types in its decoder, as tokenizer.json names them."""

    def __init__(self, tokenizer: Tokenizer, decoders: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self.is_byte_level = "ByteLevel" in decoders
        self._has_byte_fallback = "ByteFallback" in decoders
        self._added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        self._known: dict[int, bytes | None] = {}

    def of(self, token_id: int) -> bytes | None:
        """The token's bytes inside a text; None if the decoder does not determine them. A special token is its name."""
        try:
            return self._known[token_id]
        except KeyError:
            data = self._known[token_id] = self._find(token_id)
            return data

    def entry(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that only pads the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _find(self, token_id: int) -> bytes | None:
        token = self.entry(token_id)
        if self.is_byte_level:
            return bytes_of_byte_level(token)
        if token_id in self._added_ids:
            return token.encode()
        if self._has_byte_fallback and token in _BYTE_OF_FALLBACK_TOKEN:
            return _BYTE_OF_FALLBACK_TOKEN[token]
        # Some decoders drop a space at a text's start: what the token adds to a text is found after itself.
        first, both = (self._tokenizer.decode([token_id] * count) for count in (1, 2))
        if not both.startswith(first) or REPLACEMENT in both:
            return None
        data: bytes = both[len(first) :].encode()
        return data
