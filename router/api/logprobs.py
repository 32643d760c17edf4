"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.request import Token
from router.text.token_bytes import TokenBytes

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI's stand-in


def chat_logprobs(tokens: Sequence[Token], names: TokenBytes) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    content = []
    for token in tokens:
        if token.logprobs is not None:
            top = [_chat_entry(other.id, other.logprob, names) for other in token.logprobs.top]
            entry = _chat_entry(token.id, token.logprobs.logprob, names)
            content.append({**entry, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, names: TokenBytes) -> dict[str, Any]:
    data = names.of(token_id)
    return {
        "token": names.entry(token_id) if data is None else data.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": None if data is None else list(data),
    }


def completion_logprobs(tokens: Sequence[Token], offsets: Sequence[int], names: TokenBytes) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; the first token of an echoed prompt has none."""
    tops: list[dict[str, float] | None] = []
    chosen: list[float | None] = []
    for token in tokens:
        if token.logprobs is None:
            tops.append(None)
            chosen.append(None)
        else:
            chosen.append(max(token.logprobs.logprob, LEAST_LOGPROB))
            tops.append({_name(other.id, names): max(other.logprob, LEAST_LOGPROB) for other in token.logprobs.top})
    return {
        "tokens": [_name(token.id, names) for token in tokens],
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _name(token_id: int, names: TokenBytes) -> str:
    """A token's text, its key in `top_logprobs`; part of a character is spelled out in bytes, unlike all others."""
    data = names.of(token_id)
    if data is None:
        return names.entry(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
