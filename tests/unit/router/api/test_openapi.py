"""The OpenAPI document beside what the router really accepts and answers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.loop_clock import leap_to, soon
from tests.support.patience import PATIENCE_S
from tests.support.router.documented import Document
from tests.support.router.fake_nodes import FakeCluster, FakeDecodeNode, fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the code of June?"}], "max_tokens": 8}
COMPLETION: dict[str, Any] = {"prompt": "The code of", "max_tokens": 8}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
COMPANIONS: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
"""Fields that another one needs."""
DEPENDENT: dict[str, Any] = {
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 2,
    "model": "little",
    "best_of": 1,
    "tools": [],
    "stop_token_ids": [2],
    "allowed_token_ids": [2, 3],
    "logit_bias": {"5": -100, "0": 0.5},
    "n": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "reasoning_effort": "medium",
    "chat_template": None,
    "thinking_token_budget": None,
    "tool_choice": "auto",
}
"""Values of fields whose bounds depend on the model, on other fields or on the router's configuration."""


@pytest.fixture
def cluster(tokens: ModelTokens) -> FakeCluster:
    return fake_cluster([*tokens.encode("The code of June is 471."), 0], eos_id=0, resumed_tokens=1)


@pytest.fixture
async def running(start_router: StartRouter, cluster: FakeCluster) -> Running:
    return await start_router(cluster, max_body_bytes=10_000, priorities={"127.0.0.1": -(2**31)})


@pytest.fixture
async def api(running: Running) -> Document:
    return Document((await running.http.get("/openapi.json")).json())


def values(schema: dict[str, Any], api: Document) -> Iterator[Any]:
    """Values at the bounds of a schema, of each of its alternatives."""
    schema = api.resolve(schema)
    if "anyOf" in schema:
        for alternative in schema["anyOf"]:
            yield from values(alternative, api)
    elif "enum" in schema:
        yield from schema["enum"]
    elif "const" in schema:
        yield schema["const"]
    elif schema.get("type") in ("integer", "number"):
        step = 1 if schema["type"] == "integer" else 0.25
        yield schema.get("minimum", schema.get("exclusiveMinimum", 0) + step)
        yield schema.get("maximum", schema.get("exclusiveMaximum", 8) - step)
    elif schema.get("type") == "array":
        for value in values(schema["items"], api):
            yield [value]
    elif schema.get("type") == "object":
        required = {key: next(values(each, api)) for key, each in schema.get("properties", {}).items()}
        yield {key: required[key] for key in schema.get("required", ())}
        for key, each in schema.get("properties", {}).items():
            for value in values(each, api):
                yield required | {key: value}
    else:
        yield {"string": "user", "boolean": True, "null": None}[schema["type"]]


@pytest.mark.parametrize("path", ROUTES)
async def test_every_documented_field_is_accepted_at_its_bounds(running: Running, api: Document, path: str):
    properties = api.resolve(api.body(path))["properties"]
    assert {"stream", "headrace", "ignore_eos", "min_tokens", "top_k", "min_p", "repetition_penalty"} <= set(properties)
    for field, schema in properties.items():
        for value in [DEPENDENT[field], None] if field in DEPENDENT else values(schema, api):
            if field == "headrace" and (value or {}).get("checkpoint_at") == [2**32 - 1]:
                continue  # beyond the prompt
            body = ROUTES[path] | COMPANIONS.get(field, {}) | {field: value}
            api.validator(api.body(path)).validate(body)
            reply = await running.http.post(path, json=body)
            assert reply.status_code == 200, (field, value, reply.text)
            api.check(reply)


REFUSED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"temperature": 2.5},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_k": -2},
        {"n": 0},
        {"n": 129},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"the": 1}},
        {"bad_words": [""]},
        {"allowed_token_ids": []},
        {"response_format": {"type": "xml"}},
        {"tool_choice": "maybe"},
        {"functions": [{"name": "f"}]},
        {"xtc_probability": False},
        {"stream_options": {"continuous_usage_stats": 0}},
        {"headrace": {"reprot": True}},
        {"headrace": {"checkpoint_at": [0]}},
        {"top_logprobs": 21, "logprobs": True},
    ],
    "/v1/completions": [
        {"logprobs": 21},
        {"suffix": "x"},
        {"guided_choice": []},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": None},
    ],
}


async def test_the_document_and_the_router_refuse_the_same(running: Running, api: Document):
    for path, refused in REFUSED.items():
        for fields in refused:
            body = ROUTES[path] | fields
            assert not api.validator(api.body(path)).is_valid(body), fields
            reply = await running.http.post(path, json=body)
            assert reply.status_code == 400, fields
            api.check(reply)


ANSWERED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
        {"headrace": {"report": True}, "n": 2},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ],
    "/v1/completions": [
        {"echo": True, "logprobs": 2, "return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True}},
        {"prompt": ["a", "b"], "n": 2, "headrace": {"report": True}},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_chunks_are_as_documented(running: Running, api: Document, stream: bool):
    for path, answered in ANSWERED.items():
        for fields in answered:
            reply = await running.http.post(path, json=ROUTES[path] | fields | {"stream": stream})
            assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
            api.check(reply)


@pytest.mark.parametrize(
    ("path", "event", "is_event"),
    [
        ("/v1/completions", {"data": "[DONE]"}, True),
        ("/v1/completions", {"data": "{}"}, False),
        ("/v1/completions", {"data": "[STOP]"}, False),
        ("/v1/completions", {"id": "cmpl-1"}, False),
        ("/v1/messages", {"event": "ping", "data": '{"type": "ping"}'}, True),
        ("/v1/messages", {"data": '{"type": "ping"}'}, False),
        ("/v1/messages", {"data": "[DONE]"}, False),
        ("/v1/responses", {"data": "[DONE]"}, True),
    ],
)
async def test_the_document_describes_whole_events(api: Document, path: str, event: dict[str, str], is_event: bool):
    stream = api.document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert api.validator(stream["itemSchema"]).is_valid(event) is is_event


async def test_what_is_read_is_as_documented(running: Running, api: Document):
    chat = (await running.http.post("/v1/chat/completions", json=CHAT)).json()
    explained = await running.http.get(f"/cluster/requests/{chat['id']}/explain")
    assert explained.status_code == 200
    api.check(explained, "/cluster/requests/{request_id}/explain")
    for path in ("/v1/models", "/v1/models/little", "/health", "/ready", "/metrics", "/cluster"):
        reply = await running.http.get(path)
        assert reply.status_code == 200, path
        api.check(reply, path.replace("little", "{name}"))


async def test_a_busy_nodes_work_is_as_documented(running: Running, api: Document, cluster: FakeCluster):
    node = cluster.nodes["d0"]
    assert isinstance(node, FakeDecodeNode)
    node.gate = asyncio.Semaphore(0)
    first = asyncio.create_task(running.http.post("/v1/chat/completions", json=CHAT))
    async with asyncio.timeout(PATIENCE_S):
        while not node.open_calls:
            await asyncio.sleep(0.01)
    second = asyncio.create_task(running.http.post("/v1/chat/completions", json=CHAT))
    async with asyncio.timeout(PATIENCE_S):
        while not (first.done() and second.done()):
            node.gate.release()
            await asyncio.sleep(0.01)
    explained = await running.http.get(f"/cluster/requests/{(await second).json()['id']}/explain")
    api.check(explained, "/cluster/requests/{request_id}/explain")
    loads = {each["name"]: each["load"] for each in explained.json()["requests"][0]["decisions"][0]["candidates"]}
    assert 0 < loads["d0"]["shortness"] < 1


async def test_errors_are_as_documented(running: Running, api: Document):
    post = running.http.post
    replies = {
        404: await post("/v1/completions", json=COMPLETION | {"model": "other"}),
        413: await post("/v1/completions", content=b" " * 10_001),
    }
    for status, reply in replies.items():
        assert reply.status_code == status
        api.check(reply)
    missing = await running.http.get("/v1/models/other")
    assert missing.status_code == 404
    api.check(missing, "/v1/models/{name}")


async def test_refusals_without_nodes_are_as_documented(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster, register=False, heartbeat_s=0.2)
    api = Document((await running.http.get("/openapi.json")).json())
    for reply in (await running.http.post("/v1/completions", json=COMPLETION), await running.http.get("/ready")):
        assert reply.status_code == 503
        api.check(reply)


async def test_a_full_queue_and_a_late_answer_are_as_documented(start_router: StartRouter, cluster: FakeCluster):
    cluster.nodes["d0"].gate = asyncio.Semaphore(0)  # type: ignore[union-attr]
    running = await start_router(cluster, max_concurrent=1, max_queue=0, request_timeout_s=60)
    api = Document((await running.http.get("/openapi.json")).json())
    due_s = soon(60)
    late = asyncio.create_task(running.http.post("/v1/completions", json=COMPLETION))
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.nodes["d0"].open_calls:
            await asyncio.sleep(0.01)
    refused = await running.http.post("/v1/completions", json=COMPLETION)
    leap_to(due_s)
    assert (refused.status_code, (await late).status_code) == (429, 504)
    assert refused.headers["retry-after"] == "1"
    api.check(refused)
    api.check(await late)


async def test_the_docs_page_needs_no_other_host(running: Running):
    page = await running.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "openapi.json" in page.text
    assert "//" not in page.text.replace("// ", "")


async def test_the_document_names_no_error_that_the_router_does_not_send(api: Document):
    text = json.dumps(api.document)
    assert "HTTPValidationError" not in text
    assert all(reference in text for reference in ('"ChatBody"', '"ChatCompletionChunk"', '"HeadraceOptions"'))
