"""Bodies of which parts were replaced by anything: each is answered or refused by name, and none fails the router."""

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import FakeCluster, fake_cluster
from tests.support.router.model_folder import STOP_ID, write_model_folder
from tests.support.router.tool_chats import ANSWER, playing
from tests.support.router.tool_template import TOOL_TEMPLATE
from tests.unit.router.conftest import StartRouter

BODIES_EACH = 150
STATUSES = {200, 400, 404, 413}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "city": {"type": "string", "enum": ["a", "b"], "minLength": 1, "maxLength": 9, "pattern": "^a+$"},
        "days": {"type": ["integer", "null"], "minimum": 0, "multipleOf": 1},
        "point": {"$ref": "#/$defs/point"},
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "array", "items": {"type": "boolean"}}]},
        "three": {"const": 3},
        "more": {"type": "object", "additionalProperties": {"type": "string"}, "patternProperties": {"^z": {}}},
    },
    "required": ["city", "point"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
FORM = {"type": "json_schema", "json_schema": {"name": "j", "schema": SCHEMA, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"a"}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ],
    "max_tokens": 3,
}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.01, "n": 2, "seed": 7, "stop": ["x", "yy"],
    "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"5": 1.5}, "logprobs": True, "top_logprobs": 2,
    "stream_options": {"include_usage": True}, "headrace": {"report": True}, "cache_salt": "z", "min_tokens": 1,
    "stop_token_ids": [3], "bad_words": ["no"], "priority": 1, "metadata": {"a": "b"}, "chat_template_kwargs": {"k": 1},
}  # fmt: skip
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "max_output_tokens": 3,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
}
MESSAGES = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
    ],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
    "stop_sequences": ["z"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **SAMPLING}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
    ("/v1/chat/completions", {**CHAT, "response_format": FORM, "stream": True}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2, "echo": True, "logprobs": 2, "best_of": 1}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "guided_choice": ["a"], "stream": True}),
    ("/v1/responses", RESPONSE),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**64, 10**30, 0.5, 1e308, 1e-320, math.nan, math.inf, "", "x", "\x00",
    "\ud800", "auto", "none", "a" * 5000, [], {}, [[]], [None], [1, 2], {"a": None}, {"type": "text"}, {"type": ["a"]},
    {"$ref": "#"}, {"type": "json_schema"}, {"type": "regex", "pattern": "("},
    {"type": "function", "function": {"name": "weather"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "m"
    return write_model_folder(folder, chat_template=TOOL_TEMPLATE, added_tokens=("<think>", "</think>"))


@pytest.fixture
def cluster(model_folder: Path) -> FakeCluster:
    return playing(fake_cluster([], eos_id=STOP_ID), ModelTokens(model_folder), ANSWER)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and indices that lead to each part of a body."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def with_odd_parts(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The body with one to three of its parts replaced, removed or written twice."""
    odd = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *outer, last = rng.choice([*places(odd)] or [("model",)])
        holder: Any = odd
        for key in outer:
            holder = holder[key]
        match rng.choice(("replace", "replace", "replace", "remove", "repeat")):
            case "remove":
                holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
            case "repeat" if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder))
            case _:
                holder[last] = copy.deepcopy(rng.choice(ODD))
    return odd


@pytest.mark.parametrize("tool_format", ["qwen3_coder", pytest.param("hermes", marks=pytest.mark.slow)])
async def test_no_body_fails_the_router(tool_format: str, start_router: StartRouter, cluster: FakeCluster) -> None:
    running, rng = await start_router(cluster, tool_format=tool_format), random.Random(tool_format)
    for path, body in BODIES:
        for _ in range(BODIES_EACH):
            odd = json.dumps(with_odd_parts(body, rng))
            reply = await running.http.post(path, content=odd, headers={"content-type": "application/json"})
            assert reply.status_code in STATUSES, f"{path} {odd} {reply.text}"
            if reply.status_code != 200:
                assert reply.json()["error"]["message"], odd
            elif "text/event-stream" in reply.headers["content-type"]:
                assert "internal_error" not in reply.text, odd
