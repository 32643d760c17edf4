"""The messages of a chat: as clients send them, and as a chat template expects them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator

from router.api.body_schemas import Body


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; unknown fields (tool calls and the like) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    """As the model's chat template names it: `system`, `user`, `assistant`, `tool`."""
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"a part of type {kind!r:.40}: this model takes text only, no images, audio or files")
        return content

    def for_template(self) -> dict[str, Any]:
        """The message as a template expects it: the content is one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}
