"""The body of a chat, as /openapi.json describes it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from router.api.body_schemas import Whole, wrong_field
from router.api.chat_messages import ChatMessage
from router.api.request_schemas import MAX_LOGPROBS, GenerationBody
from router.api.unsupported_fields import FOR_CHATS

ToolChoice = Annotated[Any, WithJsonSchema({"enum": ["auto", "none", None]})]


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
    """`none` hides the tools from the template."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first call. Default true."""
    reasoning_effort: str | None = None
    """For templates that know it, as they name its values. `medium` is what any model does; `none` turns the reasoning
    off where the template knows `enable_thinking`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template, for models that answer from documents."""
    add_generation_prompt: bool | None = None
    """Ends the prompt with the beginning of an answer. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Goes on with the last message instead of answering it. Default false."""

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call in this answer."""
        return [] if self.tool_choice == "none" else self.tools or []

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong_field("continue_final_message", "continue_final_message needs add_generation_prompt: false")
        if self.tool_choice not in (None, "auto", "none"):
            raise wrong_field("tool_choice", "tool_choice: only 'auto' and 'none' are supported")
        return self
