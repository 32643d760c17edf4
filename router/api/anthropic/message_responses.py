"""The JSON that Anthropic's routes answer with, as /openapi.json describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from router.api.response_schemas import Response, UsageReport, absent

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageErrorDetail(Response):
    """One error."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    message: str
    """The value, the limit and the remedy."""


class MessageErrorBody(Response):
    """The body of every answer that is no success, and the last event of a stream that breaks."""

    type: Literal["error"]
    error: MessageErrorDetail


class MessageUsage(Response):
    """Tokens; those of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_creation_input_tokens: int
    """0: nothing is charged for what the cache keeps."""
    cache_read_input_tokens: int
    """Prompt tokens that no node had to compute."""
    output_tokens: int
    headrace: UsageReport | list[UsageReport] = absent()
    """Only with `headrace.report`."""


class OutputText(Response):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class OutputThinking(Response):
    """Reasoning before the answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Not checked when it comes back."""


class OutputToolUse(Response):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """The arguments; where the model wrote no JSON object, `{"invalid_arguments": ...}` with what it wrote."""


OutputBlock = OutputText | OutputThinking | OutputToolUse


class Message(Response):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The stop string that was found."""
    usage: MessageUsage


class TokenCount(Response):
    """Tokens of a chat's prompt."""

    input_tokens: int


class MessageStart(Response):
    """The first event: the message, still without content."""

    type: Literal["message_start"]
    message: Message


class Ping(Response):
    """An event without meaning."""

    type: Literal["ping"]


class BlockStart(Response):
    """A content block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class TextPiece(Response):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingPiece(Response):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignaturePiece(Response):
    """The signature of the reasoning."""

    type: Literal["signature_delta"]
    signature: str


class InputPiece(Response):
    """More of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Response):
    """The next part of a content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(Response):
    """A content block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Response):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Response):
    """The end of the message, with its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Response):
    """The last event."""

    type: Literal["message_stop"]


AnyEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageErrorBody


class MessageEvent(RootModel[AnyEvent]):
    """The data of one server-sent event, whose name is its `type`."""
