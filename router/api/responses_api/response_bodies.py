"""The body of OpenAI's Responses API, as /openapi.json describes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.api.body_schemas import Body, OpenBody, Whole
from router.api.request_schemas import HeadraceOptions, Penalty
from router.api.responses_api.refused_fields import FOR_RESPONSES
from router.api.text_parts import RefusalPart, text_only

MAX_METADATA = 16
Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(Body):
    """Text of a message or of a tool's output. Images, files and sound are not served."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningContent(Body):
    """Text of the reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


_PARTS = ("input_text", "output_text", "text", "refusal")
Text = Annotated[
    str | list[Annotated[TextContent | RefusalPart, Field(discriminator="type")]], BeforeValidator(text_only(*_PARTS))
]


class MessageItem(Body):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Body):
    """A call of a function by an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Body):
    """The output of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    """Reasoning of an earlier answer; the model reads its `content`."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningContent] | None = None
    content: list[ReasoningContent] | None = None
    encrypted_content: str | None = None
    """Not read: nothing is encrypted here."""
    status: Status | None = None


def _type_of(item: Any) -> Any:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given or "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
    BeforeValidator(
        text_only(
            *("message", "function_call", "function_call_output", "reasoning"),
            instead="send messages, function_call, function_call_output and reasoning items themselves",
        )
    ),
]


def _a_function(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        raise ValueError("not served: use tools of type 'function', which the client runs")
    return kind


class FunctionTool(Body):
    """A function that the client runs. Tools that OpenAI's servers run are not served."""

    type: Annotated[Literal["function"], BeforeValidator(_a_function)]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The function that the model must call."""

    type: Annotated[Literal["function"], BeforeValidator(_a_function)]
    name: str


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None
    """Only `medium` is supported: ask for another in the instructions."""


class ReasoningOptions(Body):
    """Reasoning before the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """`none`: no reasoning, where the model's template can switch it off. Others: as the template knows them."""
    summary: Literal["auto"] | None = None
    """No summary is made: the reasoning itself is in `content`."""
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None
    """No effect: events are not padded."""


class ResponsesBody(OpenBody):
    """The body of POST /v1/responses."""

    unsupported = FOR_RESPONSES

    model: str | None = None
    """The served model's name, as in /v1/models."""
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    """The user's message, or the items of the chat so far."""
    instructions: str | None = None
    """The system prompt of this answer alone: a response that names this one as its previous has its own."""
    previous_response_id: str | None = None
    """A stored response: its input and output come before this input."""
    store: bool | None = None
    """Keeps the response for `previous_response_id` and GET, within the router's bounds. Default true."""
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call in the answer. Default true."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """`reasoning.encrypted_content` has no effect: the reasoning is in `content`, and is read from there."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32), Whole] | None = None
    """Tokens to generate at most, reasoning included. Default: the rest of the model's length."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the answer has. Default 0."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time that the answer has it. Default 0."""
    truncation: Literal["disabled"] | None = None
    """Only `disabled` is supported: a prompt is never cut."""
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    """Returned with the response."""
    stream: bool | None = None
    """Answers with server-sent events. Default false."""
    stream_options: ResponseStreamOptions | None = None
    headrace: HeadraceOptions | None = None
