"""One choice's text: detokenizes its tokens, and cuts the text at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.request import Sampling, Token
from router.text.answer.parts import AnswerPart, ContentText, merged
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings


class TextDelta(NamedTuple):
    """The next part of a choice's text, and its tokens. A tuple: one is made for each event, in 0.6 us instead of 1.5.

    offsets     where each token begins in the text, in characters
    parsed      the text of a chat's answer, split into content, reasoning and tool calls; what may be the beginning of
                a marker comes later. None: all text is content
    is_prompt   the tokens are the prompt's, with their log-probabilities
    """

    text: str
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()
    parsed: tuple[AnswerPart, ...] | None = None
    is_prompt: bool = False

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        """The text of a chat's answer as parts."""
        if self.parsed is not None:
            return self.parsed
        return (ContentText(self.text),) if self.text else ()


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta of several that follow each other."""
    if len(deltas) == 1:
        return deltas[0]
    is_parsed = any(delta.parsed is not None for delta in deltas)
    return TextDelta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(offset for delta in deltas for offset in delta.offsets),
        tuple(merged(part for delta in deltas for part in delta.parts)) if is_parsed else None,
    )


class TextStream:
    """The text of one choice and its number of tokens. The text begins at `offset`, the length of an echoed prompt.

    The token that ends the sequence counts, but adds no text; neither does anything from a stop string on. With
    `include_stop` both are part of the text. Stop strings are looked for after the first `min_tokens` tokens only.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: Sampling,
        stops: Sequence[str],
        eos_ids: frozenset[int],
        offset: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, is_shown=include_stop)
        self._include_stop = include_stop
        self._min_tokens = sampling.min_tokens
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_ids)
        self._ending_ids = frozenset(ending)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._offset = offset
        self.num_tokens = 0
        self.stop_token: int | None = None
        """The one of the client's stop tokens that ended the sequence."""

    @property
    def stop_found(self) -> str | None:
        """The stop string that was found, after which no more text follows."""
        return self._stops.found

    def push(self, tokens: Sequence[Token]) -> TextDelta:
        """The text that these tokens complete, and those of them that come before the end of a stop string."""
        shown: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            if self._stops.found is not None:
                break
            self.num_tokens += 1
            offsets.append(self._offset)
            ends = token.id in self._ending_ids and self.num_tokens >= self._min_tokens
            if ends and token.id in self._stop_ids:
                self.stop_token = token.id
            text = "" if ends and not self._include_stop else self._detokenizer.push(token.id)
            self._offset += len(text)
            if text:
                shown.append(text if self.num_tokens <= self._min_tokens else self._stops.push(text))
        return TextDelta("".join(shown), tuple(tokens[: len(offsets)]), tuple(offsets))

    def finish(self) -> str:
        """The text still held back: the beginning of a stop string, an unfinished character."""
        if self._stops.found is not None:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
