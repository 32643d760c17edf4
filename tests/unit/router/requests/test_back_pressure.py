"""Clients that read too slowly, or not at all: what they hold in the router and at the nodes."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from headrace.wire import messages as m
from router.text.tokens import ModelTokens
from tests.support.loop_clock import leap_to, soon
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, decode_node, text_of

LONG = 100_000  # tokens: more than the sockets between router and client hold


async def start(start_router: StartRouter, cluster: FakeCluster, **settings: Any) -> Running:
    decode_node(cluster, "d0").tokens_per_event = 64
    running = await start_router(cluster, register=False, **settings)
    for info in cluster.infos():
        running.server.nodes.register(replace(info, max_model_tokens=2 * LONG), node_status())
    return running


@asynccontextmanager
async def unread(running: Running, **body: Any) -> AsyncIterator[socket.socket]:
    """The socket of a client that sends a request and reads nothing."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    data = json.dumps(chat | body).encode()
    host, port = running.server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        await loop.sock_sendall(client, head + data)
        yield client


async def generated(running: Running) -> int:
    """Tokens that the router has taken from the nodes, of all requests that it shows."""
    rows = (await running.http.get("/cluster")).json()["requests"]
    return sum(row["generated_tokens"] for row in rows)


async def stands_still(count: Callable[[], Awaitable[int]]) -> int:
    """The count once it has not changed for half a second, however slow the machine."""
    async with asyncio.timeout(PATIENCE_S):
        last = -1
        while (now := await count()) != last or now == 0:
            last = now
            await asyncio.sleep(0.5)
    return last


async def test_a_client_that_reads_nothing_stops_its_own_choices_and_nobody_elses(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, eos_id=0)
    running = await start(start_router, cluster, max_unread_bytes=1 << 16)
    async with unread(running, max_tokens=LONG, stream=True, n=2):
        taken = await stands_still(lambda: generated(running))
        assert taken < LONG, "the nodes' streams must not be read on"
        assert text_of(await ask(running)) == TEXT
        assert "headrace_unread_answers_total 0.0" not in (await running.http.get("/metrics")).text
    async with asyncio.timeout(PATIENCE_S):
        while decode_node(cluster, "d0").open_calls:
            await asyncio.sleep(0.01)
    await assert_idle(running)


async def test_tokens_of_a_client_that_reads_nothing_are_not_taken_either(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    running = await start(start_router, cluster, max_unread_bytes=1 << 12)
    node = decode_node(cluster, "d0")
    node.tokens_per_event = 1
    async with unread(running, max_tokens=LONG, stream=True, logprobs=False, top_logprobs=None):
        assert 0 < await stands_still(lambda: generated(running)) < LONG
    assert 0 < node.num_taken < LONG


async def test_a_client_that_falls_behind_gets_its_whole_answer_when_it_reads_again(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer)
    running = await start(start_router, cluster, max_unread_bytes=1 << 12)
    body = {"prompt": "hi", "max_tokens": 3000, "stream": True, "return_token_ids": True, "ignore_eos": True}
    ids: list[int] = []
    async with running.http.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids", [])
    assert ids == [answer[place % len(answer)] for place in range(3000)]


async def test_a_client_that_stops_reading_for_a_while_gets_its_whole_answer_in_order(
    start_router: StartRouter, answer: list[int]
):
    """Its tokens are written as they come, then gathered, then written as they come."""
    cluster = fake_cluster(answer, eos_id=0)
    running = await start(start_router, cluster, max_unread_bytes=1 << 12)
    decode_node(cluster, "d0").tokens_per_event = 1
    data = bytearray()
    async with (
        asyncio.timeout(PATIENCE_S),
        unread(
            running, max_tokens=30_000, stream=True, return_token_ids=True, logprobs=False, top_logprobs=None
        ) as client,
    ):
        assert await stands_still(lambda: generated(running)) < 30_000
        while not data.endswith(b"0\r\n\r\n"):
            data += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
    parts = [json.loads(ids) for ids in re.findall(rb'"token_ids":(\[.*?\])', data)]
    assert [each for ids in parts for each in ids] == [answer[place % len(answer)] for place in range(30_000)]
    assert {1} < set(map(len, parts)), "some came alone, and some together"


async def test_a_stop_string_is_found_though_the_client_does_not_read(start_router: StartRouter, tokens: ModelTokens):
    stop = 5_000
    cluster = fake_cluster([*tokens.encode("a") * stop, *tokens.encode("STOP"), *tokens.encode("a") * LONG])
    # More than the sockets hold is generated before the stop string, and all of it fits the bound.
    running = await start(start_router, cluster, max_unread_bytes=1 << 30)
    async with unread(running, max_tokens=LONG, stream=True, stop=["STOP"]):
        async with asyncio.timeout(PATIENCE_S):
            while m.Stop() not in decode_node(cluster, "d0").commands:
                await asyncio.sleep(0.01)
        assert stop <= await stands_still(lambda: generated(running)) <= stop + 100


async def test_an_answer_that_is_not_read_keeps_its_place_in_the_router(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    running = await start(start_router, cluster, max_concurrent=1, max_queue=1)
    async with unread(running, max_tokens=4_500):
        await stands_still(lambda: generated(running))
        other = asyncio.create_task(ask(running))
        async with asyncio.timeout(PATIENCE_S):
            while (await running.http.get("/cluster")).json()["waiting"] != 1:
                await asyncio.sleep(0.01)
        assert (await running.http.get("/cluster")).json()["phases"]["done"] == 1, "its nodes are done with it"
    assert text_of(await other) == TEXT  # once the client has left


async def test_the_time_of_a_request_covers_the_reading_of_its_answer(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    running = await start(start_router, cluster, request_timeout_s=1.0)
    async with unread(running, max_tokens=LONG, stream=True), asyncio.timeout(PATIENCE_S):
        while "headrace_requests_total{outcome=" not in (await running.http.get("/metrics")).text:
            await asyncio.sleep(0.05)


async def test_an_answer_that_is_not_taken_in_time_gives_its_place_back(start_router: StartRouter, answer: list[int]):
    """Though its nodes are done with it, and its client stays."""
    cluster = fake_cluster(answer, eos_id=0)
    settings = {"max_concurrent": 1, "request_timeout_s": 60.0, "unread_timeout_s": 1e6, "idle_timeout_s": 1e6}
    running = await start(start_router, cluster, **settings)
    due_s = soon(60.0)
    async with unread(running, max_tokens=4_500):
        await stands_still(lambda: generated(running))
        assert (await running.http.get("/cluster")).json()["phases"]["done"] == 1
        leap_to(due_s)
        other = {"prompt": "hi", "max_tokens": 3}
        async with asyncio.timeout(PATIENCE_S):
            while (await running.http.post("/v1/completions", json=other)).status_code != 200:
                await asyncio.sleep(0.05)
