"""The body of a chat, as /openapi.json describes it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from router.api.body_schemas import Whole, wrong_field
from router.api.chat_messages import NAMED_FUNCTION, ChatMessage, has_name
from router.api.request_schemas import MAX_LOGPROBS, GenerationBody
from router.api.unsupported_fields import FOR_CHATS
from router.errors import bad_request

NAMED_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": NAMED_FUNCTION,
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required", None]}, NAMED_TOOL], "default": None})
]


TOOL_SHAPE = '{"type": "function", "function": {"name": ...}}'
NO_PARAMETERS = {"type": "object", "properties": {}}


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with `parameters`, which OpenAI lets functions without any leave out, and templates do not."""
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": NO_PARAMETERS}}


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unsupported = FOR_CHATS

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The chat so far."""
    max_completion_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    """As `max_tokens`, and before it."""
    logprobs: bool | None = None
    """Adds each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    """The most likely tokens at each position; needs `logprobs`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, passed to the chat template. Calls come back as `tool_calls`."""
    tool_choice: ToolChoice = None
    """`auto`: the model decides; `none` hides the tools from the template; `required`: the answer is one or more calls;
    a function's name: a call of it."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first call. Default true."""
    reasoning_effort: str | None = None
    """For templates that know it, as they name its values. `medium` is what any model does; `none` turns the reasoning
    off where the template knows `enable_thinking`."""
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31), Whole] | None = None
    """The most tokens of the reasoning, from the prompt's end or the marker that begins it; its end is written then."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    chat_template: str | None = None
    """A chat template, in Jinja, that takes the place of the model's. Refused unless the router's
    `trust_request_chat_template` is on."""
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template, for models that answer from documents."""
    add_generation_prompt: bool | None = None
    """Ends the prompt with the beginning of an answer. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Goes on with the last message instead of answering it. Default false."""

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in tools or ():
            if (kind := tool.get("type")) not in (None, "function"):
                raise ValueError(f"type {kind!r:.40} is not served: use 'function', which the client runs")
            if not has_name(tool.get("function")):
                raise ValueError(f"{tool!r:.100} names no function: give {TOOL_SHAPE}")
            if not isinstance(parameters := tool["function"].get("parameters"), dict | None):
                raise ValueError(f"parameters {parameters!r:.100} must be an object, a JSON Schema")
        return None if tools is None else list(map(_with_parameters, tools))

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call in this answer."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer must be a call; empty: it may be any text. Raises ApiError (400)."""
        if self.tool_choice in (None, "auto", "none"):
            return []
        tools = self.tools or []
        if not tools:
            message = f"tool_choice {self.tool_choice!r:.100} without tools: give tools, or leave it out"
            raise bad_request(message, "tool_choice")
        if self.tool_choice != "required":
            name = self.tool_choice["function"]["name"]
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            message = f"tool_choice {self.tool_choice!r:.100}: there is no such tool; add it to tools"
            raise bad_request(message, "tool_choice")
        return tools

    @property
    def max_calls(self) -> int | None:
        """Calls that the answer may have; None: any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, dict) else None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong_field("continue_final_message", "continue_final_message needs add_generation_prompt: false")
        if self.tool_choice not in (None, "auto", "none", "required") and not _names_tool(self.tool_choice):
            raise wrong_field(
                "tool_choice",
                f"tool_choice {self.tool_choice!r:.100}: must be 'auto', 'none', 'required', or {TOOL_SHAPE} "
                "with the name of a tool",
            )
        return self


def _names_tool(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function" and has_name(choice.get("function"))
