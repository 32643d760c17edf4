"""The session of a request: what agents send so that the requests of one conversation are known as such."""

from __future__ import annotations

from starlette.datastructures import Headers

from router.requests.client import Client

SESSION_HEADERS = ("x-session-affinity", "x-claude-code-session-id", "session-id", "x-session-id")
"""In the order in which they count: gateways', Claude Code's, Codex's, and others'."""
MAX_LENGTH = 256


def session_of(headers: Headers, prompt_cache_key: str, client: Client) -> str:
    """The request's session, apart from those of other clients; empty if it names none. A header goes before the
    body's `prompt_cache_key`; of a long name the beginning counts."""
    given = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), prompt_cache_key)
    return f"{client.name}\0{given[:MAX_LENGTH]}" if given else ""
