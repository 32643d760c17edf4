"""The JSON of chats' answers, as /openapi.json describes it."""

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

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Response):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    """-9999 for an impossible token."""
    bytes: list[int] | None
    """The token's bytes; null where the model's tokenizer does not determine them."""


class TokenLogprob(TopLogprob):
    """One generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    """Log-probabilities of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Response):
    """The function that a call names."""

    name: str
    arguments: str
    """A JSON object, unless the model broke it or the answer was cut."""


class ToolCall(Response):
    """A call that the client should make, and answer in a `tool` message with this id."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(Response):
    """The name with a call's first part; then fragments of its arguments."""

    name: str = absent()
    arguments: str


class ToolCallDelta(Response):
    """The next part of a call; `id` and `type` come with its first one."""

    index: int
    id: str = absent()
    type: Literal["function"] = absent()
    function: FunctionDelta


class AssistantMessage(Response):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    """Null if the message has only reasoning or tool calls."""
    reasoning_content: str = absent()
    """The model's reasoning before its answer, if it wrote any."""
    tool_calls: list[ToolCall] = absent()
    """Calls of the request's `tools`."""


class ChatChoice(AnswerChoice):
    """One answer to a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatDelta(Response):
    """The next part of a message: its role first, then one of the other fields, and nothing at the end."""

    role: Literal["assistant"] = absent()
    content: str = absent()
    reasoning_content: str = absent()
    tool_calls: list[ToolCallDelta] = absent()


class ChatChunkChoice(AnswerChoice):
    """The next part of one answer to a chat."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletion(AnswerEnvelope):
    """The answer to POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = absent()
    """Only with `prompt_logprobs`."""


class ChatCompletionChunk(ChunkEnvelope):
    """The data of one server-sent event of a streamed chat; `[DONE]` ends the stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
