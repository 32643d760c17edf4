"""The session of a request: what agents send so that the requests of one conversation are known as such."""

from __future__ import annotations

from collections.abc import Iterable

from router.requests.client import Client

SESSION_HEADERS = ("x-session-affinity", "x-claude-code-session-id", "session-id", "x-session-id")
"""In the order in which they count: gateways', Claude Code's, Codex's, and others'."""
MAX_LENGTH = 256
_SESSION_HEADERS = tuple(name.encode() for name in SESSION_HEADERS)


def session_of(headers: Iterable[tuple[bytes, bytes]], prompt_cache_key: str, client: Client) -> str:
    """The request's session, apart from those of other clients; empty if it names none. A header goes before the
    body's `prompt_cache_key`; of a long name the beginning counts."""
    found = {name: value for name, value in headers if value and name in _SESSION_HEADERS}
    if not found and not prompt_cache_key:
        return ""
    given = next((found[name].decode("latin-1") for name in _SESSION_HEADERS if name in found), prompt_cache_key)
    return f"{client.name}\0{given[:MAX_LENGTH]}" if given else ""
