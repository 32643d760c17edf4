"""The JSON of completions, as /openapi.json describes it."""

from __future__ import annotations

from typing import Literal

from router.api.response_schemas import (
    AnswerChoice,
    AnswerEnvelope,
    ChunkEnvelope,
    PromptLogprobs,
    Response,
    Usage,
    absent,
)

CompletionFinishReason = Literal["stop", "length"]


class CompletionLogprobs(Response):
    """Log-probabilities of a completion's choice; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Start of each token in the choice's text, in characters."""


class CompletionChoice(AnswerChoice):
    """One answer to a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason
    prompt_logprobs: PromptLogprobs = absent()
    """Only with `prompt_logprobs`."""


class CompletionChunkChoice(AnswerChoice):
    """The next part of one answer to a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None


class Completion(AnswerEnvelope):
    """The answer to POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(ChunkEnvelope):
    """The data of one server-sent event of a streamed completion; `[DONE]` ends the stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
