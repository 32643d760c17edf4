"""The `anthropic` package against a router over fake nodes, and what it does not show."""

from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.router.anthropic_contract import AnthropicContract
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

TEXT = "The code of June is 471. A channel carries the stream over stones."
CHAT: dict[str, Any] = {"model": "little", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    return await start_router(fake_cluster([*tokens.encode(TEXT), 0], eos_id=0, resumed_tokens=1))


class TestOverFakeNodes(AnthropicContract):
    @pytest.fixture
    def router_url(self, running: Running) -> str:
        return running.server.url


async def test_the_stop_sequence_is_named(running: Running):
    stopped = (await running.http.post("/v1/messages", json=CHAT | {"stop_sequences": ["June", "of May"]})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "June")
    assert stopped["content"] == [{"type": "text", "text": "The code of "}]
    cut = (await running.http.post("/v1/messages", json=CHAT | {"max_tokens": 2})).json()
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 2)


async def test_cached_tokens_are_counted_apart(running: Running):
    usage = (await running.http.post("/v1/messages", json=CHAT)).json()["usage"]
    counted = (await running.http.post("/v1/messages/count_tokens", json=CHAT)).json()["input_tokens"]
    assert usage["cache_read_input_tokens"] == 1
    assert usage["input_tokens"] == counted - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1025]}, "at most 1024"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type 'web_search_20250305'"),
        ({"tool_choice": {"type": "tool"}}, "name goes with type 'tool'"),
        ({"container": "c1"}, "container 'c1' is not supported"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        (
            {
                "messages": [
                    *CHAT["messages"],
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ]
            },
            "the last message calls tools",
        ),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 5}, "at most 4"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "'image'",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_in_anthropics_shape(
    running: Running, change: dict[str, Any], message: str
):
    reply = await running.http.post("/v1/messages", json=CHAT | change)
    error = reply.json()
    assert (reply.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in error["error"]["message"]


async def test_every_error_below_its_path_has_anthropics_shape(running: Running):
    http = running.http
    replies = {
        404: await http.post("/v1/messages/batches", json={}),
        405: await http.get("/v1/messages"),
        413: await http.post("/v1/messages", content=b" " * (33 << 20)),
    }
    for status, reply in replies.items():
        assert reply.status_code == status
        assert reply.json()["type"] == "error"
    old = await http.post("/v1/messages", json=CHAT, headers={"anthropic-version": "2023-01-01"})
    assert old.status_code == 400 and "2023-06-01" in old.json()["error"]["message"]
