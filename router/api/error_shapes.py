"""The JSON of errors in the shape of the API that was asked, which the path says."""

from __future__ import annotations

from router.errors import ApiError


def error_json(path: str, error: ApiError) -> str:
    """The body of an error's answer to a request for `path`."""
    return error.json()
