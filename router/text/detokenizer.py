"""Incremental detokenization: token ids in, text out as soon as its characters are complete.

Source: `DecodeStream` of the tokenizers library, primed with the end of the prompt as vLLM's
`v1/engine/detokenizer.py` does it. A token takes 0.95 us; an incremental UTF-8 decoder over the bytes of byte-level
tokens, which serves no other tokenizer, takes 0.45 us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.text.token_bytes import REPLACEMENT

MAX_HELD = 32
"""Tokens held back for the end of a character, which has at most four bytes. Without a bound, a model that repeats
U+FFFD grows `DecodeStream`'s window, and the time of each step with it."""
PRIMING_LENGTHS = range(4, 25)  # tokens of the prompt, as in vLLM


class Detokenizer:
    """The text of one sequence of tokens, by default without its special tokens except those that are `shown`.

    The text continues `prompt`: decoders that drop a space at the start of a text (Metaspace, WordPiece) keep it here.
    What `push` and `finish` return joins to the tokenizer's own `decode`, with two exceptions. Byte-fallback decoders
    turn a whole run of byte tokens into U+FFFD if its end is invalid, but its first characters are already out. And
    U+FFFD stands for a character whose bytes follow `MAX_HELD` tokens of invalid bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._skips = skip_special_tokens
        self._context = _context_of(tokenizer, prompt, skip_special_tokens)
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skips)

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._shown:
            return (self._restart() if self._held else "") + self._shown[token_id]
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix": a token changed the text before it, as in an invalid run of byte tokens
            return self._restart()
        if text is not None:
            self._context, self._held = self._held, []
            return text
        return self._restart() if len(self._held) == MAX_HELD else ""

    def finish(self) -> str:
        """The text still held back: an unfinished character becomes U+FFFD."""
        if not self._held:
            return ""
        shown = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        return text[len(shown) :] if text.startswith(shown) else self._decode(self._held)

    def _restart(self) -> str:
        text = self.finish()
        self._held = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skips)
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skips)
        return text


def _context_of(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """A short end of the prompt, with text if it has any, that splits no character; empty if the prompt does."""
    context: list[int] = []
    for length in PRIMING_LENGTHS:
        ids = list(prompt[-length:])
        text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT not in text:
            context = ids
        if (context and text) or length >= len(prompt):
            break
    return context
