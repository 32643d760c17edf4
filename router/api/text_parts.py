"""Parts of messages: text is served, and a part of any other kind is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from router.api.body_schemas import Body


class RefusalPart(Body):
    """An assistant's text that says why it does not answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


TEXT_ONLY = "this model takes text only, no images, audio or files"


def text_only(*known: str, instead: str = TEXT_ONLY) -> Callable[[Any], Any]:
    """A validator before others: raises ValueError for a part, or a list's first part, of a type that is not known."""

    def check(value: Any) -> Any:
        for part in value if isinstance(value, list) else [value]:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                raise ValueError(f"type {kind!r:.40} is not served: {instead}")
        return value

    return check
