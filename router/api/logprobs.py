"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from headrace.request import Token
from router.errors import invalid_logits
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI's stand-in
SLICE_NUMBERS = 512
"""Log-probabilities rendered at a time: a millisecond's work, during which the interpreter runs nothing else."""

Columns = dict[str, str]
"""Rendered log-probabilities: for each list of OpenAI's object its items as JSON, without the brackets."""


def slices(delta: TextDelta) -> Iterator[TextDelta]:
    """Parts of the delta with at most SLICE_NUMBERS log-probabilities, or one token; its text goes with the first."""
    a_token = num_logprobs(delta.tokens[-1:])
    if not a_token:
        yield delta
        return
    step = max(1, SLICE_NUMBERS // a_token)
    for first in range(0, len(delta.tokens), step):
        part = slice(first, first + step)
        text, parts = ("", ()) if first else (delta.text, delta.parsed)
        yield TextDelta(text, delta.tokens[part], delta.offsets[part], parts, delta.is_prompt)


def num_logprobs(tokens: Sequence[Token]) -> int:
    """Log-probabilities of the tokens, those of their alternatives among them."""
    return sum(1 + len(token.logprobs.top) for token in tokens if token.logprobs is not None)


def columns_of(logprobs: Mapping[str, Any]) -> Columns:
    """The lists of `chat_logprobs` or `completion_logprobs`, rendered."""
    return {name: dumps(items)[1:-1] for name, items in logprobs.items() if isinstance(items, list)}


def logprobs_json(parts: Sequence[Columns], *, is_chat: bool) -> str:
    """OpenAI's object of parts that follow each other; null if there are none."""
    if not parts:
        return "null"
    lists = [f'"{name}": [{", ".join(part[name] for part in parts if part[name])}]' for name in parts[0]]
    return "{" + ", ".join([*lists, '"refusal": null'] if is_chat else lists) + "}"


def dumps(value: Any) -> str:
    """Strict JSON: raises ValueError for NaN and infinities, which clients cannot parse."""
    # A text is each event's; `json.dumps` makes an encoder for each, which takes twenty times as long.
    return encode_basestring_ascii(value) if type(value) is str else json.dumps(value, allow_nan=False)


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
        "logprob": _number(logprob),
        "bytes": None if data is None else list(data),
    }


def completion_logprobs(tokens: Sequence[Token], offsets: Sequence[int], names: TokenBytes) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; the first token of an echoed prompt has none.

    As OpenAI has it, a token is among its own alternatives, so that these may be one more than asked for.
    """
    tops: list[dict[str, float] | None] = []
    chosen: list[float | None] = []
    for token in tokens:
        if token.logprobs is None:
            tops.append(None)
            chosen.append(None)
        else:
            logprob = _number(token.logprobs.logprob)
            chosen.append(logprob)
            top = {_name(other.id, names): _number(other.logprob) for other in token.logprobs.top}
            tops.append({_name(token.id, names): logprob} | top)
    return {
        "tokens": [_name(token.id, names) for token in tokens],
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs_items(tokens: Sequence[Token], names: TokenBytes) -> str:
    """Items of vLLM's `prompt_logprobs`: null for a prompt's first token, and for each other one an object by token id,
    the token itself first. Its rank is null unless it is one of the alternatives."""
    return ", ".join(dumps(_prompt_entry(token, names)) for token in tokens)


def _prompt_entry(token: Token, names: TokenBytes) -> dict[str, Any] | None:
    if token.logprobs is None:
        return None
    ranks = {other.id: rank for rank, other in enumerate(token.logprobs.top, 1)}
    logprobs = {token.id: token.logprobs.logprob} | {other.id: other.logprob for other in token.logprobs.top}
    return {
        str(token_id): {
            "logprob": _number(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _name(token_id, names),
        }
        for token_id, logprob in logprobs.items()
    }


def _number(logprob: float) -> float:
    """At least LEAST_LOGPROB. Raises ApiError (500) for a NaN, which stands for logits that are no distribution."""
    if not logprob < math.inf:
        message = "the model computed logits that are not numbers for this request: an overflow, or broken weights"
        raise invalid_logits(message)
    return max(logprob, LEAST_LOGPROB)


def _name(token_id: int, names: TokenBytes) -> str:
    """A token's text, its key in `top_logprobs`; part of a character is spelled out in bytes, unlike all others."""
    data = names.of(token_id)
    if data is None:
        return names.entry(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
