"""Writers of answers: one for each API, between the choices' text and the bytes that clients read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace.request import FinishReason
from router.api.generation import GenerationRequest
from router.api.logprobs import Columns
from router.errors import ApiError
from router.text.answer.parts import AnswerPart
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes

ANSWER_END = b"\n"  # after the JSON of a whole answer


class RenderedDelta(NamedTuple):
    """A delta whose log-probabilities are JSON already; None: it has none. A tuple, as `TextDelta` is one.

    parts           of a chat's text
    prompt          items of `prompt_logprobs`
    num_generated   tokens of the answer among its tokens: an echoed prompt's are none
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Columns | None
    parts: tuple[AnswerPart, ...] = ()
    prompt: str | None = None
    num_generated: int = 0


@dataclass(frozen=True)
class ChoiceEnd:
    """Why a choice ended: the stop string that was found, or the client's stop token that was drawn, if it was that.

    has_calls   the answer has tool calls
    """

    reason: FinishReason
    stop: str | None = None
    stop_token: int | None = None
    has_calls: bool = False


@dataclass(frozen=True)
class AnswerUsage:
    """Tokens of all choices. A prompt with several choices counts once, with the cached tokens of its first choice.

    reasoning_tokens   None: the model writes no reasoning that is known as such
    report   how the cluster served the choices, if the client asked for it: one object, or one for each choice
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    report: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    reasoning_tokens: int | None = None


class AnswerWriter(Protocol):
    """Writes the answer to one generation request in the shape of one API, whole or as server-sent events.

    For a stream: of each choice `begin`, its `delta`s and `finish`, in this order; then `end`. For a whole answer:
    `whole` alone.
    """

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        """Renders what takes long, in any thread; raises ApiError (500) for log-probabilities that are no numbers."""
        ...

    def begin(self, index: int) -> bytes:
        """The events before a choice's first text."""
        ...

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        """The events for the next text of a choice; empty where there is nothing to send."""
        ...

    def finish(self, index: int, end: ChoiceEnd) -> bytes:
        """The events after a choice's last text."""
        ...

    def end(self, usage: AnswerUsage) -> bytes:
        """The events after the last choice."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""
        ...

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], ChoiceEnd]], usage: AnswerUsage) -> bytes:
        """The answer without streaming, from each choice's deltas and its end, in any thread."""
        ...


WriterOf = Callable[[GenerationRequest, TokenBytes], AnswerWriter]
"""Makes the writer for a generation request."""


def event(data: str, name: str | None = None) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode() if name is None else f"event: {name}\ndata: {data}\n\n".encode()
