"""The messages of a chat: as clients send them, and as a chat template expects them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, WithJsonSchema, field_validator, model_validator

from router.api.body_schemas import Body
from router.api.text_parts import RefusalPart, text_only


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


ContentPart = TextPart | RefusalPart
NAMED_FUNCTION = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CALL = {"type": "object", "properties": {"function": NAMED_FUNCTION}, "required": ["function"]}
CALL_SHAPE = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
UNSERVED = {"function_call": "use tool_calls", "audio": "this model takes text only"}
"""Fields of a message whose loss would change the answer, and what to do."""


class ChatMessage(Body):
    """One message; unknown fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    """As the model's chat template names it: `system`, `user`, `assistant`, `tool`. A `developer` is the system where
    the template knows no such role."""
    content: Annotated[str | list[ContentPart] | None, BeforeValidator(text_only("text", "refusal"))] = None
    """Text, or parts of it, which are joined by newlines."""
    tool_calls: list[Annotated[dict[str, Any], WithJsonSchema(CALL)]] | None = None
    """An assistant's calls as they came; each is answered by a `tool` message with its id as `tool_call_id`."""
    tool_call_id: str | None = None
    """The call that a `tool` message answers."""
    reasoning_content: str | None = None
    """An assistant's reasoning as it came, for templates that show it again. `reasoning` means the same."""

    @field_validator("tool_calls")
    @classmethod
    def _calls(cls, calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for call in calls or ():
            function = call.get("function", call)  # some templates read calls without the object around
            if not has_name(function):
                raise ValueError(f"{call!r:.100} names no function: give {CALL_SHAPE}")
            arguments = function.get("arguments")
            if not isinstance(arguments, str | dict | None):
                raise ValueError(f"arguments {arguments!r:.100} must be JSON in a string, or an object")
        return calls

    @model_validator(mode="after")
    def _served(self) -> Self:
        for name, remedy in UNSERVED.items():
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported: {remedy}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one string, and the fields that the client gave."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return {**(self.model_extra or {}), **given, "role": self.role, "content": content or ""}


def has_name(function: Any) -> bool:
    """True for a function of a tool, a call or a choice, each of which says which one it is."""
    return isinstance(function, dict) and isinstance(function.get("name"), str)
