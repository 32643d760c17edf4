"""The OpenAPI document of the Responses and Messages APIs beside what the router really accepts and answers."""

from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.router.documented import Document
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

RESPONSE: dict[str, Any] = {"input": "What is the code of June?", "max_output_tokens": 8}
MESSAGE: dict[str, Any] = {"model": "little", "max_tokens": 8, "messages": [{"role": "user", "content": "June?"}]}
ROUTES = {"/v1/responses": RESPONSE, "/v1/messages": MESSAGE}
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [
        {"headrace": {"report": True}},
        {"store": False, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "temperature": 0.5},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "background": False},
        {"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "user": "someone"},
        {"reasoning": {"effort": None, "summary": "auto"}, "truncation": "disabled", "top_logprobs": 0},
        {"max_output_tokens": 2, "instructions": "Be brief.", "parallel_tool_calls": False},
    ],
    "/v1/messages": [
        {"headrace": {"report": True}},
        {"system": "Be brief.", "stop_sequences": ["June"], "temperature": 0.5, "top_k": 5, "top_p": 0.9},
        {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "tools": []},
        {"max_tokens": 2, "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
    ],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"max_output_tokens": 0},
        {"tools": [{"type": "web_search"}]},
        {"background": True},
        {"include": ["file_search_call.results"]},
        {"truncation": "auto"},
        {"temperature": 3},
    ],
    "/v1/messages": [
        {"max_tokens": 0},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"container": "c"},
        {"stop_sequences": ["a"] * 17},
    ],
}


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    cluster = fake_cluster([*tokens.encode("The code of June is 471."), 0], eos_id=0, resumed_tokens=1)
    return await start_router(cluster)


@pytest.fixture
async def api(running: Running) -> Document:
    return Document((await running.http.get("/openapi.json")).json())


@pytest.mark.parametrize("path", ROUTES)
async def test_answers_and_events_are_as_documented(running: Running, api: Document, path: str):
    for fields in ACCEPTED[path]:
        for stream in (False, True):
            body = ROUTES[path] | fields | {"stream": stream}
            api.validator(api.body(path)).validate(body)
            reply = await running.http.post(path, json=body)
            assert reply.status_code == 200, (fields, reply.text)
            assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
            api.check(reply)


@pytest.mark.parametrize("path", ROUTES)
async def test_the_document_and_the_router_refuse_the_same(running: Running, api: Document, path: str):
    for fields in REFUSED[path]:
        body = ROUTES[path] | fields
        assert not api.validator(api.body(path)).is_valid(body), fields
        reply = await running.http.post(path, json=body)
        assert reply.status_code == 400, fields
        api.check(reply)
    missing = await running.http.post(path, json=ROUTES[path] | {"model": "other"})
    assert missing.status_code == 404
    api.check(missing)


async def test_stored_responses_and_counts_are_as_documented(running: Running, api: Document):
    response = (await running.http.post("/v1/responses", json=RESPONSE)).json()
    path, documented = f"/v1/responses/{response['id']}", "/v1/responses/{response_id}"
    for reply in (await running.http.get(path), await running.http.delete(path), await running.http.delete(path)):
        api.check(reply, documented)
    assert reply.status_code == 404
    for path, body in {
        "/v1/messages/count_tokens": {key: MESSAGE[key] for key in ("model", "messages")},
        "/tokenize": {"prompt": "The code.", "return_token_strs": True},
        "/detokenize": {"tokens": [5, 6]},
    }.items():
        api.validator(api.body(path)).validate(body)
        reply = await running.http.post(path, json=body)
        assert reply.status_code == 200
        api.check(reply)
    version = await running.http.get("/version")
    api.check(version)
