"""Turns of OpenAI's chats as chat templates expect them: calls' arguments as objects, reasoning, roles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.chat_template import ChatTemplate, Message

MAX_DEPTH = 64
"""Nesting of arguments that a template gets as an object: it writes them recursively."""


def turns_for(template: ChatTemplate, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as this template takes them.

    Fields that are null are absent. A `developer` is the system where the template knows no such role. Arguments of
    calls are objects where they parse, for templates iterate over them; those that a model broke stay text where the
    template writes text, and are empty where it would refuse them. An assistant's reasoning has both of its names.
    """
    return [_turn(template, message) for message in messages]


def _turn(template: ChatTemplate, message: Message) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if value is not None}
    if turn["role"] == "developer" and not template.knows("developer"):
        turn["role"] = "system"
    if turn["role"] == "assistant":
        reasoning = turn.get("reasoning_content", turn.get("reasoning"))
        if isinstance(reasoning, str):
            turn["reasoning_content"] = turn["reasoning"] = reasoning
    calls = turn.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        turn["tool_calls"] = [_call(template, call) for call in calls]
    elif calls:
        turn["tool_calls"] = calls
    return turn


def _call(template: ChatTemplate, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    written = function.get("arguments") if isinstance(function, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(written, str | None):
        return call
    arguments: Any = _parsed(written or "")
    if arguments is None:
        arguments = written if template.takes_argument_text else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> dict[str, Any] | None:
    """The object that the text is, not too deep; an empty text is one without arguments."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_deeper(value, MAX_DEPTH) else None


def _is_deeper(value: Any, depth: int) -> bool:
    layer = [value]
    for _ in range(depth):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True
