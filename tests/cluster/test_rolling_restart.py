"""Nodes and the router of a Ray cluster get SIGTERM: they leave, end or hand over their requests, and come back."""

import asyncio
import os
import signal
from functools import partial

import pytest

from deploy.demo import MODEL
from headrace.host_process import own_niceness
from tests.support.cluster.recall_clients import Habits
from tests.support.cluster.recall_load import RecallLoad
from tests.support.cluster.shell import END_S, START_S, incarnation, nodes_of, until

pytestmark = pytest.mark.slow


async def test_every_node_restarts_in_turn_and_no_request_is_lost(shell):
    url = shell.up("--prefill", 2, "--decode", 2)
    before = nodes_of(url)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in shell.actors()} == {own_niceness()}
    load = await RecallLoad.against(url, MODEL)
    async with load.running(Habits(num_clients=2)):
        for name, node in before.items():
            await load.answered(2)
            os.kill(node["pid"], signal.SIGTERM)
            await asyncio.to_thread(until, partial(is_another, url, name, node), START_S, f"{name} is back")
        await load.answered(2)
    assert load.wrong == [] and not load.errors
    log = shell.log()
    assert "Fatal Python error" not in log and "SIGABRT" not in log
    assert all(f"{name} stops: SIGTERM" in log for name in before)
    status, output = shell.run("down", timeout_s=END_S)
    assert status == 0, output


def is_another(url, name, node):
    return incarnation(url, name) not in (None, node["incarnation"])
