"""The JSON of errors in the shape of the API that was asked, which the path says."""

from __future__ import annotations

from router.api.anthropic.message_errors import message_error
from router.errors import ApiError

ANTHROPIC = "/v1/messages"


def error_json(path: str, error: ApiError) -> str:
    """The body of an error's answer to a request for `path`: Anthropic's shape below /v1/messages, else OpenAI's."""
    is_anthropics = path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")
    return message_error(error) if is_anthropics else error.json()
