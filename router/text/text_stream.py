"""One choice in the making: tokens in, deltas of text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.request import Sampling, Token
from router.text.detokenizer import Detokenizer, TokenBytes
from router.text.stop_strings import StopStrings


@dataclass(frozen=True)
class TextDelta:
    """What may be shown now. `offsets`: where each token's text begins in the whole text, in characters."""

    text: str
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()


class TextStream:
    """Text and number of tokens of one choice; its text begins `offset` characters after an echoed prompt's start.

    The token that ends the sequence counts, but adds no text; neither does anything from a stop string on.
    Stop strings are looked for after the first `min_tokens` tokens only.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        sampling: Sampling,
        stops: Sequence[str],
        eos_ids: frozenset[int],
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stops)
        self._min_tokens = sampling.min_tokens
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_ids)
        self._ending_ids = frozenset(ending)
        self._offset = offset
        self.num_tokens = 0

    @property
    def stop_found(self) -> bool:
        """Whether a stop string was found: nothing more will be shown."""
        return self._stops.found

    def push(self, tokens: Sequence[Token]) -> TextDelta:
        """The text that these tokens make certain, and those of them that belong to the answer."""
        shown: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            if self._stops.found:
                break
            self.num_tokens += 1
            offsets.append(self._offset)
            text = "" if self._ends(token.id) else self._detokenizer.push(token.id)
            self._offset += len(text)
            if text:
                shown.append(text if self.num_tokens <= self._min_tokens else self._stops.push(text))
        return TextDelta("".join(shown), tuple(tokens[: len(offsets)]), tuple(offsets))

    def finish(self) -> str:
        """What was held back: the beginning of a stop string that did not come, half a character."""
        if self._stops.found:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    def _ends(self, token_id: int) -> bool:
        return token_id in self._ending_ids and self.num_tokens >= self._min_tokens
