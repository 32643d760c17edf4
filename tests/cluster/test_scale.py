"""A cluster on Ray gets more nodes and fewer under load, and one of its nodes is drained: no request is lost."""

import asyncio

import pytest

from deploy.demo import MODEL
from tests.support.cluster.recall_clients import Habits
from tests.support.cluster.recall_load import RecallLoad
from tests.support.cluster.shell import END_S, nodes_of

pytestmark = pytest.mark.slow


async def test_scaling_up_and_down_and_a_drain_lose_no_request(shell):
    file = shell.folder / "cluster.yaml"
    file.write_text(f"model: {MODEL}\nrouter: {{port: 0, roles: fixed}}\n")
    url = shell.up("-c", file, "--prefill", 1, "--decode", 1)
    load = await RecallLoad.against(url, MODEL)
    async with load.running(Habits(num_clients=2)):
        await load.answered(2)
        status, output = await asyncio.to_thread(shell.run, "scale", "--prefill", 2, "--decode", 3)
        assert status == 0 and "default has p0, d0, p1, d1, d2; new: p1, d1, d2" in output, output
        assert set(nodes_of(url)) == {"p0", "p1", "d0", "d1", "d2"}
        await load.answered(4)
        status, output = await asyncio.to_thread(shell.run, "drain", "d0")
        assert status == 0 and "d0 is drained" in output, output
        assert set(nodes_of(url)) == {"p0", "p1", "d1", "d2"}
        await load.answered(2)
        status, output = await asyncio.to_thread(shell.run, "scale", "--prefill", 1, "--decode", 1)
        assert status == 0 and output.index("p1 is drained") < output.index("d2 is drained"), output
        assert set(nodes_of(url)) == {"p0", "d1"}
        await load.answered(2)
    print(f"{len(load.answers)} answers while nodes came and went, {len(load.wrong)} wrong, {len(load.errors)} lost")
    assert load.wrong == [] and not load.errors
    status, output = await asyncio.to_thread(shell.run, "drain", "d1")
    assert status == 1 and "no other node decodes than d1" in output
    status, output = await asyncio.to_thread(shell.run, "scale", "--decode", 100)
    assert status == 1 and "Ray has no room for more nodes" in output and "CPU" in output
    assert set(nodes_of(url)) == {"p0", "d1"}
    assert shell.run("status")[0] == 0
    status, output = shell.run("down", timeout_s=END_S)
    assert status == 0, output
