"""The JSON that the routes of the Responses API answer with, as /openapi.json describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from router.api.response_schemas import Response, UsageReport, absent

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextContent(Response):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Empty."""
    logprobs: list[Any]
    """Empty."""


class ReasoningTextContent(Response):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class _Item(Response):
    id: str
    status: ItemStatus


class OutputMessage(_Item):
    """The answer's message."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextContent]


class OutputReasoning(_Item):
    """Reasoning before the answer."""

    type: Literal["reasoning"]
    summary: list[Any]
    """Empty."""
    content: list[ReasoningTextContent]


class OutputFunctionCall(_Item):
    """A call of a function that the client runs."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON, unless the model broke it."""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(Response):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that no node had to compute."""


class OutputTokensDetails(Response):
    """Parts of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Response):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    headrace: UsageReport | list[UsageReport] = absent()
    """Only with `headrace.report`."""


class ResponseError(Response):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Response):
    """Why a response was cut."""

    reason: Literal["max_output_tokens"]


class EchoedTool(Response):
    """A function as the client described it."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class EchoedFormat(Response):
    """The form of the text as the client asked for it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = absent()
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class EchoedText(Response):
    """Options of the text."""

    format: EchoedFormat


class EchoedReasoning(Response):
    """Options of the reasoning."""

    effort: str | None
    summary: None


class EchoedChoice(Response):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class ResponseResource(Response):
    """The answer to POST /v1/responses. Fields that are not described are the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    incomplete_details: IncompleteDetails | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[OutputItem]
    error: ResponseError | None
    tools: list[EchoedTool]
    tool_choice: Literal["auto", "none", "required"] | EchoedChoice
    truncation: Literal["disabled"]
    parallel_tool_calls: bool
    text: EchoedText
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: EchoedReasoning
    usage: ResponseUsage | None
    max_output_tokens: int | None
    max_tool_calls: None
    store: bool
    background: Literal[False]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    safety_identifier: None
    prompt_cache_key: None
    user: None


class DeletedResponse(Response):
    """A stored response that was dropped."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _Event(Response):
    sequence_number: int
    """From 0, in order."""


class LifecycleEvent(_Event):
    """The response as a whole: created, in progress, and at the end completed, incomplete or failed."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseResource


class ItemEvent(_Event):
    """An output item begins or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _PartEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class ContentPartEvent(_PartEvent):
    """A content part begins or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputTextContent | ReasoningTextContent


class TextDeltaEvent(_PartEvent):
    """More text."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    delta: str
    logprobs: list[Any] = absent()
    """Empty; of the answer's text alone."""


class TextDoneEvent(_PartEvent):
    """A whole text."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    text: str
    logprobs: list[Any] = absent()
    """Empty; of the answer's text alone."""


class ArgumentsDeltaEvent(_Event):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(_Event):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


AnyResponseEvent = (
    LifecycleEvent
    | ItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)


class ResponseEvent(RootModel[AnyResponseEvent]):
    """The data of one server-sent event, whose name is its `type`; `[DONE]` ends the stream."""
