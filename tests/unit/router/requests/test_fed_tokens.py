"""Tokens taken at once, as a feed brings them, over fake nodes: the client gets what the call's events give."""

import json
from typing import Any

import pytest

from headrace.wire import messages as m
from headrace.wire.errors import NodeLost
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import FakeCluster, Fault, fake_cluster
from tests.unit.router.conftest import StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, decode_node, text_of

BOTH_WAYS = pytest.mark.parametrize("has_feed", [True, False])


def cluster_of(answer: list[int], has_feed: bool, **more: Any) -> FakeCluster:
    cluster = fake_cluster(answer, eos_id=0, **more)
    for node in cluster.nodes.values():
        node.has_feed = has_feed
    return cluster


@BOTH_WAYS
async def test_an_answer_is_shown_token_by_token_and_counted(
    start_router: StartRouter, answer: list[int], has_feed: bool
):
    cluster = cluster_of(answer, has_feed)
    running = await start_router(cluster)
    body = {"prompt": "a", "max_tokens": 100, "stream": True, "return_token_ids": True}
    reply = await running.http.post("/v1/completions", json=body)
    deltas = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if "{" in line]
    choices = [delta["choices"][0] for delta in deltas if delta["choices"]]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == answer
    assert (decode_node(cluster, "d0").num_taken > 0) == has_feed
    metrics = (await running.http.get("/metrics")).text
    assert f"headrace_inter_token_seconds_count {len(answer) - 1}.0" in metrics
    await assert_idle(running)


@BOTH_WAYS
@pytest.mark.parametrize("tokens_per_event", [1, 3])
async def test_a_stop_string_ends_the_answer_and_its_node(
    start_router: StartRouter, answer: list[int], has_feed: bool, tokens_per_event: int
):
    cluster = cluster_of(answer, has_feed)
    decode_node(cluster, "d0").tokens_per_event = tokens_per_event
    running = await start_router(cluster)
    result = await ask(running, stop=["471"], ignore_eos=True, max_tokens=2000)
    assert (text_of(result), result["choices"][0]["finish_reason"]) == (TEXT.split("471")[0], "stop")
    assert decode_node(cluster, "d0").commands == [m.Stop()]
    await assert_idle(running)


@BOTH_WAYS
@pytest.mark.parametrize("after_tokens", [1, 2, 7])
async def test_another_node_goes_on_behind_the_last_token_that_was_shown(
    start_router: StartRouter, answer: list[int], has_feed: bool, after_tokens: int
):
    cluster = cluster_of(answer, has_feed, decode=2)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "reset"), after_tokens)]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["migrations"] == 1
    (first,), (second,) = cluster.nodes["d0"].requests, cluster.nodes["d1"].requests
    # The first of them is the prefill node's.
    assert list(second.tokens)[len(first.tokens) :] == answer[: 1 + after_tokens]
    assert (cluster.nodes["d0"].num_taken > 0) == has_feed
    await assert_idle(running)
