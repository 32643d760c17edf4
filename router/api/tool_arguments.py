"""Arguments of tool calls as models write them, for APIs that answer with an object."""

from __future__ import annotations

import json
from typing import NoReturn

BROKEN = "invalid_arguments"


def json_object(arguments: str) -> str:
    """The arguments as they are if they are a JSON object, `{}` for none, else an object with them as one string."""
    if not arguments.strip():
        return "{}"
    try:
        is_object = isinstance(json.loads(arguments, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    return arguments if is_object else json.dumps({BROKEN: arguments})


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
