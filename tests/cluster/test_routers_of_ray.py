"""Two routers of one Ray cluster: one is killed under load, and Ray brings it back at its address."""

import asyncio
import os
import signal
import threading
import time

import httpx
import pytest

from deploy.demo import MODEL
from tests.support.cluster.recall_clients import Habits
from tests.support.cluster.recall_load import RecallLoad
from tests.support.cluster.shell import END_S, START_S, nodes_of, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NODES = {"p0", "d0"}


async def test_a_killed_router_comes_back_and_the_other_serves_on(shell):
    file = shell.folder / "cluster.yaml"
    file.write_text(f"model: {MODEL}\nrouter: {{port: 0, count: 2, roles: fixed}}\n")
    status, output = shell.run("up", "-c", file, "--detach")
    assert status == 0, output
    killed, other = urls = shell.record()["urls"]
    assert all(url in output for url in urls)
    (status, output) = shell.run("status")
    assert all(url in output for url in urls)
    load = await RecallLoad.against(other, MODEL)
    async with load.running(Habits(num_clients=1)):
        await load.answered(1)
        broken = in_background(lambda: long_answer(killed))
        await asyncio.to_thread(until, lambda: running_requests(killed) >= 2, PATIENCE_S, "both requests run")
        at_s = time.monotonic()
        os.kill(shell.listener(killed), signal.SIGKILL)
        assert isinstance(await asyncio.to_thread(broken), httpx.HTTPError)
        await asyncio.to_thread(until, lambda: set(nodes_of(killed)) == NODES, START_S, "it knows all nodes again")
        print(f"router killed: at its address again, with all nodes, after {time.monotonic() - at_s:.1f} s")
        await load.answered(2)
    assert load.wrong == [] and not load.errors
    for url in urls:
        await asyncio.to_thread(until, lambda url=url: is_idle(url), PATIENCE_S, f"{url} sees all pools returned")
    assert shell.run("down", timeout_s=END_S)[0] == 0


def long_answer(url):
    """The error that cuts it short."""
    body = {"prompt": "The code of", "max_tokens": 4000, "ignore_eos": True}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    except httpx.HTTPError as error:
        return error


def in_background(function):
    """A function that waits for the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        return results[0]

    return result


def running_requests(url):
    return nodes_of(url)["d0"]["running"]  # roles are fixed: every answer is generated there


def is_idle(url):
    held = [node[pool]["in_use"] for node in nodes_of(url).values() for pool in ("blocks", "slots")]
    return len(held) == 4 and not any(held)
