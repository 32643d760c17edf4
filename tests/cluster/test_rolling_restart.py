"""Nodes and the router of a Ray cluster get SIGTERM: they leave, end or hand over their requests, and come back."""

import asyncio
import os
import signal
from functools import partial

import httpx
import pytest

from deploy.demo import MODEL
from headrace.host_process import own_niceness
from tests.support.cluster.recall_clients import Habits
from tests.support.cluster.recall_load import RecallLoad
from tests.support.cluster.shell import END_S, START_S, answer_of, incarnation, nodes_of, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow


async def test_all_nodes_and_the_router_restart_in_turn_and_no_request_is_lost(shell):
    file = shell.folder / "cluster.yaml"
    file.write_text(f"model: {MODEL}\nrouter: {{shutdown_grace_s: {PATIENCE_S}}}\n")
    url = shell.up("-c", file, "--prefill", 2, "--decode", 2)
    before = nodes_of(url)
    assert set(before) == {"p0", "p1", "d0", "d1"}
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in shell.actors()} == {own_niceness()}
    load = await RecallLoad.against(url, MODEL)
    async with load.running(Habits(num_clients=2)):
        for name, node in before.items():
            await load.answered(2)
            os.kill(node["pid"], signal.SIGTERM)
            await asyncio.to_thread(until, partial(is_another, url, name, node), START_S, f"{name} is back")
        await load.answered(2)
    assert load.wrong == [] and not load.errors

    old = shell.listener(url)
    answer = asyncio.create_task(asyncio.to_thread(answer_of, url, 2000))
    await asyncio.to_thread(until, lambda: answer.done() or is_running(url), PATIENCE_S, "the request runs")
    os.kill(old, signal.SIGTERM)
    assert await answer
    await asyncio.to_thread(until, lambda: set(nodes_of(url)) == set(before), START_S, "the router knows all nodes")
    assert shell.listener(url) != old

    log = shell.log()
    assert "Fatal Python error" not in log and "SIGABRT" not in log
    assert all(f"{name} stops: SIGTERM" in log for name in (*before, "router"))
    status, output = shell.run("down", timeout_s=END_S)
    assert status == 0, output


def is_running(url):
    requests = httpx.get(f"{url}/cluster", timeout=PATIENCE_S).json()["requests"]
    return any(request["phase"] == "decoding" for request in requests)


def is_another(url, name, node):
    return incarnation(url, name) not in (None, node["incarnation"])
