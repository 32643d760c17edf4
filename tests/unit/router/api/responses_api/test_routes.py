"""The `openai` package's Responses API against a router over fake nodes, and what it does not show."""

import asyncio
import json
from typing import Any

import pytest

from headrace.wire.errors import NodeLost
from router.keys import ApiKey, hash_of, new_key
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import Fault, fake_cluster
from tests.support.router.responses_contract import ResponsesContract
from tests.unit.router.conftest import Running, StartRouter

TEXT = "The code of June is 471. A channel carries the stream over stones."
ASKED: dict[str, Any] = {"input": "hi", "max_output_tokens": 9}


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    cluster = fake_cluster([*tokens.encode(TEXT), 0], eos_id=0, resumed_tokens=1)
    return await start_router(cluster, client_header="x-tenant", max_attempts=1)


class TestOverFakeNodes(ResponsesContract):
    @pytest.fixture
    def router_url(self, running: Running) -> str:
        return running.server.url


async def test_another_tenants_response_is_as_if_it_were_not_there(running: Running):
    http = running.http
    mine = (await http.post("/v1/responses", json=ASKED, headers={"x-tenant": "a"})).json()
    path, other = f"/v1/responses/{mine['id']}", {"x-tenant": "b"}
    continuing = ASKED | {"previous_response_id": mine["id"]}
    assert (await http.get(path, headers=other)).status_code == 404
    assert (await http.delete(path, headers=other)).status_code == 404
    refused = await http.post("/v1/responses", json=continuing, headers=other)
    made_up = await http.post("/v1/responses", json=ASKED | {"previous_response_id": "resp_1"}, headers=other)
    assert refused.json()["error"]["code"] == made_up.json()["error"]["code"] == "previous_response_not_found"
    assert (await http.get(path, headers={"x-tenant": "a"})).json() == mine


async def test_keys_of_one_tenant_share_what_is_stored(start_router: StartRouter, tokens: ModelTokens):
    ann, too, bob = (new_key() for _ in range(3))
    keys = {
        "ann": ApiKey(hash_of(ann), tenant="acme"),
        "too": ApiKey(hash_of(too), tenant="acme"),
        "bob": ApiKey(hash_of(bob)),
    }
    http = (await start_router(fake_cluster(tokens.encode("a")), api_keys=keys)).http
    made = await http.post("/v1/responses", json=ASKED, headers={"authorization": f"Bearer {ann}"})
    path = f"/v1/responses/{made.json()['id']}"
    found = [(await http.get(path, headers={"x-api-key": key})).status_code for key in (ann, too, bob)]
    assert found == [200, 200, 404]
    refused = await http.post("/v1/messages", json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_long_chat_is_continued_in_a_parsing_process(running: Running):
    long = await running.http.post("/v1/responses", json=ASKED | {"input": "the code of June " * 400})
    assert long.status_code == 200
    second = await running.http.post("/v1/responses", json=ASKED | {"previous_response_id": long.json()["id"]})
    assert second.json()["usage"]["input_tokens"] > long.json()["usage"]["input_tokens"] > 1000


async def test_a_cut_response_is_incomplete_and_stored(running: Running):
    cut = (await running.http.post("/v1/responses", json=ASKED | {"max_output_tokens": 2})).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["completed_at"] is None
    assert (await running.http.get(f"/v1/responses/{cut['id']}")).json() == cut


async def test_a_stream_that_breaks_ends_with_a_failed_response_that_is_not_stored(running: Running):
    running.cluster.nodes["d0"].faults.append(Fault(NodeLost("d0", "gone"), after_tokens=3))
    for _ in range(3):
        running.cluster.nodes["d0"].faults.append(Fault(NodeLost("d0", "gone")))
    reply = await running.http.post("/v1/responses", json=ASKED | {"stream": True})
    *events, failed, end, nothing = reply.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    assert len(events) > 4
    assert failed.startswith("event: response.failed\n")
    response = json.loads(failed.partition("data: ")[2])["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert (await running.http.get(f"/v1/responses/{response['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(running: Running, change: dict[str, Any], message: str):
    reply = await running.http.post("/v1/responses", json=ASKED | change)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_stored_chats_that_are_parsed_again_count_among_the_bodies(
    start_router: StartRouter, tokens: ModelTokens
):
    """A body of a hundred bytes may continue a chat of megabytes, once for each request that waits to be parsed."""
    running = await start_router(
        fake_cluster([*tokens.encode(TEXT), 0], eos_id=0), max_body_bytes=8192, max_bodies_bytes_per_client=8192
    )
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a" * 5000}]}
    said = [{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}]
    first = await running.http.post("/v1/responses", json=ASKED | {"input": [*said, {"role": "user", "content": "c"}]})
    assert first.status_code == 200, first.text
    continuing = ASKED | {"previous_response_id": first.json()["id"]}
    replies = await asyncio.gather(*(running.http.post("/v1/responses", json=continuing) for _ in range(4)))
    assert {reply.status_code for reply in replies} == {200, 429}
    assert {each.json()["error"]["code"] for each in replies if each.status_code == 429} == {"too_many_body_bytes"}
    assert (await running.http.post("/v1/responses", json=continuing)).status_code == 200
