"""The bodies of Anthropic's Messages API, as /openapi.json describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from router.api.anthropic.refused_fields import FOR_MESSAGES
from router.api.body_schemas import Body, OpenBody, Whole
from router.api.request_schemas import MAX_STOPS, HeadraceOptions, check_stop_strings
from router.api.text_parts import text_only

MAX_CACHE_MARKS = 4

NoOtherLifetime = Literal["5m", "1h"]


class CacheControl(Body):
    """A hint that prompts to come begin with everything up to here."""

    type: Literal["ephemeral"]
    ttl: NoOtherLifetime | None = None
    """No effect: a checkpoint stays as long as the cache has room."""


class _Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that only its own server can read: left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The output of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock] | None, BeforeValidator(text_only("text"))] = None
    is_error: bool | None = None
    """No effect: the template of no model that is served here has a place for it."""


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class InputMessage(Body):
    """One turn of the chat so far."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[AnyBlock], BeforeValidator(text_only(*_BLOCKS))]


def _of_the_client(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError("not served: describe a tool that the client runs, with input_schema and without type")
    return kind


class InputTool(_Block):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_of_the_client)] = None
    """Tools that run on Anthropic's servers, or that only its models know, are not served."""
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    """The choice between calling tools and answering."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool to call, with type `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with type 'tool', and with no other")
        return self


class Thinking(Body):
    """Reasoning before the answer. Default: disabled."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31), Whole] | None = None
    """The most tokens of the reasoning, as `thinking_token_budget` of a chat; `max_tokens` counts them, too."""

    @property
    def max_tokens(self) -> int | None:
        """The budget of reasoning that is asked for; None: there is no bound."""
        return self.budget_tokens if self.type == "enabled" else None


class OutputFormat(Body):
    """The JSON schema that the answer's text keeps to."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """No effect: no model that is served here knows it."""
    format: OutputFormat | None = None


class CountBody(OpenBody):
    """The body of POST /v1/messages/count_tokens."""

    unsupported = FOR_MESSAGES

    model: str
    """The served model's name, as in /v1/models."""
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    """The chat so far. A last message of the assistant is the beginning of the answer, which goes on with it."""
    system: str | list[TextBlock] | None = None
    """The system prompt."""
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    """As if it stood at the last block of the last message."""
    headrace: HeadraceOptions | None = None

    @property
    def system_blocks(self) -> list[TextBlock]:
        """The system prompt as blocks."""
        if isinstance(self.system, str):
            return [TextBlock(type="text", text=self.system)]
        return self.system or []


class MessagesBody(CountBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**32), Whole]
    """Tokens to generate at most, reasoning included."""
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    """Strings that end the answer and are not part of it."""
    stream: bool | None = None
    """Answers with server-sent events. Default false."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token. Anthropic's own goes up to 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=0, lt=2**32), Whole] | None = None
    """Samples from this many most likely tokens; 0: from all."""

    @field_validator("stop_sequences")
    @classmethod
    def _stops(cls, value: list[str] | None) -> list[str] | None:
        check_stop_strings(value or ())
        return value
