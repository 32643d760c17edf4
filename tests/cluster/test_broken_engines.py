"""Nodes whose engine breaks: what they say about it, and how they end."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.wire.errors import NodeCrashed, NodeLost, RequestRefused
from headrace.wire.messages import LocalPrefill, Reservation, Start
from node.config import NodeConfig
from tests.support.cluster.broken_node import POISON, BrokenNode
from tests.support.cluster.cluster import SMALL, Cluster
from tests.support.cluster.nodes import decode_alone, node_client, status_of
from tests.support.cluster.process import Process
from tests.support.engine.driving import GREEDY, request
from tests.support.patience import PATIENCE_S


def start(fault: str, model: Path, folder: Path, **changes: Any) -> Process:
    config = NodeConfig("d0", str(model), engine=SMALL, **changes)
    return Process.start("d0", BrokenNode(config, fault), folder)  # type: ignore[arg-type]


@pytest.fixture
def model(tiny_checkpoint) -> Path:
    return tiny_checkpoint("granite")


async def until_running(address: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await status_of(address)).running < count:
            await asyncio.sleep(0.01)


async def test_only_the_requests_of_the_step_that_raised_are_told_that_it_did(model, tmp_path) -> None:
    node = start("raises", model, tmp_path)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            node_client("d0", node.ready["address"]) as client,
            client.decode(Start(request([7] * 20)), timeout_s=PATIENCE_S) as waiting,
        ):
            events = aiter(waiting)
            assert isinstance(await anext(events), Reservation)
            with pytest.raises(NodeCrashed, match=r"RuntimeError: an illegal memory access$"):
                await decode_alone(client, request([POISON] * 20))
            with pytest.raises(NodeLost, match="the engine has crashed") as lost:
                await anext(events)
            assert not isinstance(lost.value, NodeCrashed), "it had no part in that step"
        assert "in the step that failed: request r (20 tokens, max_tokens 16)" in node.log.read_text()
    finally:
        node.stop()


async def test_a_step_without_memory_costs_one_request_and_no_node(model, tmp_path) -> None:
    node = start("no memory", model, tmp_path)
    try:
        async with node_client("d0", node.ready["address"]) as client, asyncio.timeout(PATIENCE_S):
            beside = asyncio.create_task(decode_alone(client, request([7] * 20, replace(GREEDY, max_tokens=200))))
            await until_running(node.ready["address"], 1)
            with pytest.raises(RequestRefused, match="needs more memory than this node has"):
                await decode_alone(client, request([POISON] * 20))
            assert len(await beside) == 200
            assert len(await decode_alone(client, request([8] * 20))) == GREEDY.max_tokens
            status = await status_of(node.ready["address"])
            assert status.counters["memory_shortages"] == 1
        assert "request r (20 tokens, max_tokens 16) needs more memory" in node.log.read_text()
    finally:
        node.stop()


async def test_a_node_says_how_it_is_during_its_first_step(model, tmp_path) -> None:
    node = start("hangs", model, tmp_path)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            node_client("d0", node.ready["address"]) as client,
            client.decode(Start(request([POISON] * 20), may_prefill_remotely=False), timeout_s=PATIENCE_S) as call,
        ):
            assert isinstance(await anext(aiter(call)), LocalPrefill)
            for _ in range(3):
                assert (await status_of(node.ready["address"])).blocks.total > 0
    finally:
        node.kill()
        node.wait()


async def test_a_node_in_which_no_thread_can_run_is_ended_from_outside(model, tmp_path) -> None:
    node = start("keeps the GIL", model, tmp_path, watchdog_s=5.0)
    async with node_client("d0", node.ready["address"]) as client, asyncio.timeout(PATIENCE_S):
        with pytest.raises(NodeLost):
            await decode_alone(client, request([POISON] * 20))
    await asyncio.to_thread(node.wait)
    assert node.exit_status == -signal.SIGABRT
    log = node.log.read_text()
    assert "d0: no thread has run Python for 5" in log and "(watchdog_s 5)" in log
    assert "broken_node.py" in log, "it shows where the engine's thread hangs"


async def test_a_node_whose_engine_hangs_says_so_and_ends_and_its_successor_serves(model, tmp_path) -> None:
    with Cluster(model, tmp_path, num_prefill=0, decode={"watchdog_s": 5.0}) as cluster:
        cluster.processes["d1"] = Process.start("d1", BrokenNode(cluster.config_of("d1"), "hangs"), tmp_path)
        cluster.wait_for_nodes(2)
        hung = cluster.processes["d1"]
        async with (
            node_client("d1", hung.ready["address"]) as client,
            httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
            asyncio.timeout(PATIENCE_S),
        ):
            asking = asyncio.create_task(decode_alone(client, request([POISON] * 20)))
            while not (await status_of(hung.ready["address"])).stalled_s:
                await asyncio.sleep(0.1)
            with pytest.raises(NodeLost):
                await asking
            await asyncio.to_thread(hung.wait)
            assert not hung.is_alive
            log = hung.log.read_text()
            assert "d1: the engine has stood still for 5" in log and "(watchdog_s 5): this process ends" in log
            assert "broken_node.py" in log, "it shows where the engine's thread hangs"
            answer = await http.post("/v1/completions", json={"prompt": [7] * 20, "max_tokens": 3})
            assert answer.status_code == 200, answer.text
        cluster.start_node("d1")
        cluster.wait_for_nodes(2)
        address = cluster.processes["d1"].ready["address"]
        async with node_client("d1", address) as client:
            assert len(await decode_alone(client, request([9] * 20))) == GREEDY.max_tokens
