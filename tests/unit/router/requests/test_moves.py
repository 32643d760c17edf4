"""A running request moves to another decode node, over fake nodes: every token is shown once, in order."""

import asyncio
from typing import Any, Literal

import pytest

from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeLost, RequestRefused, TransferBroken
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, FakeDecodeNode, Fault, fake_cluster
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, decode_node, text_of


class UntilHalt(asyncio.Semaphore):
    """Lets some tokens of an answer pass, and the others once a node was told to halt: none ends before it can move."""

    def __init__(self, nodes: list[FakeDecodeNode]) -> None:
        super().__init__(4)
        self._nodes = nodes

    async def acquire(self) -> Literal[True]:
        while self.locked() and not any(m.Halt() in node.commands for node in self._nodes):
            await asyncio.sleep(0.001)
        return self.locked() or await super().acquire()


async def serving(running: Running) -> tuple[FakeDecodeNode, FakeDecodeNode]:
    """The decode node that has sent a token of the only request, and the other one. Called before it is sent."""
    nodes = [decode_node(running.cluster, name) for name in ("d0", "d1")]
    for node in nodes:
        node.gate = UntilHalt(nodes)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = (await running.http.get("/cluster")).json()["requests"]
            if rows and rows[0]["phase"] == "decoding" and rows[0]["generated_tokens"] > 2:
                nodes.sort(key=lambda node: node.name != rows[0]["decode_node"])
                return nodes[0], nodes[1]
            await asyncio.sleep(0.001)


async def drained(running: Running, node: str, **body: Any) -> dict[str, Any]:
    reply = await running.http.post(f"/cluster/nodes/{node}/drain", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def counts(report: dict[str, Any]) -> tuple[int, int, int]:
    return report["moved"], report["recomputed"], report["ended"]


@pytest.fixture
def cluster(answer: list[int]) -> FakeCluster:
    """Two decode nodes that take a while for each token."""
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    for name in ("d0", "d1"):
        decode_node(cluster, name).step_s = 0.005
    return cluster


async def test_a_drained_nodes_request_goes_on_at_the_other_one(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    assert counts(await drained(running, sender.name)) == (1, 0, 0)
    assert sender.is_stopped
    result = await asking
    report = result["usage"]["headrace"]
    assert (text_of(result), report["moves"], report["migrations"]) == (TEXT, 1, 0)
    assert report["decode"]["node"] == receiver.name
    assert [type(command) for command in sender.commands] == [m.Halt, m.HandOver]
    assert len(cluster.nodes["p0"].requests) == 1, "no prefill node computes anything again"
    await assert_idle(running)


async def test_a_kept_node_is_not_stopped_and_gets_no_work(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    assert counts(await drained(running, "d0", keep=True)) == (0, 0, 0)
    assert not decode_node(cluster, "d0").is_stopped
    for _ in range(2):
        assert (await ask(running))["usage"]["headrace"]["decode"]["node"] == "d1"
    states = {node["name"]: node["state"] for node in (await running.http.get("/cluster")).json()["nodes"]}
    assert states == {"d0": "draining", "d1": "live", "p0": "live"}


async def test_a_request_stays_where_it_is_while_nobody_has_room(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    receiver.faults = [Fault(NodeBusy(receiver.name, "full"))] * 50
    assert counts(await drained(running, sender.name, keep=True)) == (0, 0, 1)
    result = await asking
    assert (text_of(result), result["usage"]["headrace"]["decode"]["node"]) == (TEXT, sender.name)
    assert m.GoOn() in sender.commands
    await assert_idle(running)


@pytest.mark.parametrize("error", [RequestRefused("d", "too long for it"), NodeLost("d", "gone")])
async def test_a_receiver_that_fails_before_it_reserves_costs_nothing(
    start_router: StartRouter, cluster: FakeCluster, error: Any
):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    receiver.faults = [Fault(error)]
    await drained(running, sender.name, keep=True)
    result = await asking
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 0)
    await assert_idle(running)


@pytest.mark.parametrize("error", [TransferBroken("d", "reset"), NodeLost("d", "killed"), RequestRefused("d", "odd")])
async def test_a_sender_that_fails_in_the_middle_is_replaced_by_a_prefill_node(
    start_router: StartRouter, cluster: FakeCluster, error: Any
):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    sender.faults = [Fault(error)]
    assert counts(await drained(running, sender.name, keep=True)) == (0, 1, 0)
    result = await asking
    report = result["usage"]["headrace"]
    assert (text_of(result), report["moves"], report["decode"]["node"]) == (TEXT, 0, receiver.name)
    assert [type(command) for command in receiver.commands] == [m.Renew]
    assert len(cluster.nodes["p0"].requests) == 2
    await assert_idle(running)


async def test_a_receiver_that_breaks_in_the_middle_is_renewed(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    receiver.faults = [Fault(TransferBroken(receiver.name, "digest"))]
    assert counts(await drained(running, sender.name, keep=True)) == (0, 1, 0)
    assert text_of(await asking) == TEXT
    assert [type(command) for command in receiver.commands] == [m.Renew]
    await assert_idle(running)


async def test_a_move_that_never_lands_is_repaired(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster, landing_timeout_s=0.1)
    asking = asyncio.create_task(ask(running))
    sender, _ = await serving(running)
    sender.num_lost_transfers = 1
    assert counts(await drained(running, sender.name, keep=True)) == (0, 1, 0)
    assert text_of(await asking) == TEXT
    await assert_idle(running)


async def test_a_preempted_request_begins_again_elsewhere(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    sender.can_halt = False
    assert counts(await drained(running, sender.name, keep=True)) == (0, 1, 0)
    result = await asking
    assert (text_of(result), result["usage"]["headrace"]["decode"]["node"]) == (TEXT, receiver.name)
    await assert_idle(running)


async def test_what_has_not_moved_in_time_begins_again_elsewhere(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    sender.hold_halt = asyncio.Event()
    assert counts(await drained(running, sender.name, keep=True, timeout_s=0.1)) == (0, 1, 0)
    result = await asking
    assert (text_of(result), result["usage"]["headrace"]["decode"]["node"]) == (TEXT, receiver.name)
    await assert_idle(running)


@pytest.mark.parametrize(
    ("failing", "state"), [("sender", "AwaitingRenewal"), ("receiver", "AwaitingRenewal"), ("halt", "Migrating")]
)
async def test_the_warning_of_a_request_that_begins_again_names_the_state_in_which_its_move_ended(
    start_router: StartRouter, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, failing: str, state: str
):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    if failing == "halt":
        sender.can_halt = False
    else:
        {"sender": sender, "receiver": receiver}[failing].faults = [Fault(TransferBroken(failing, "reset"))]
    await drained(running, sender.name, keep=True)
    await asking
    [warning] = [record.getMessage() for record in caplog.records if "could not be handed over" in record.msg]
    assert warning.endswith(f" could not be handed over to {receiver.name}: it is computed again ({state})")


async def test_a_client_that_leaves_in_the_middle_ends_the_move(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, _ = await serving(running)
    sender.hold_halt = asyncio.Event()
    draining = asyncio.create_task(drained(running, sender.name, keep=True))
    async with asyncio.timeout(PATIENCE_S):
        while m.Halt() not in sender.commands:
            await asyncio.sleep(0.001)
    asking.cancel()
    assert counts(await draining) == (0, 0, 1)
    await assert_idle(running)


async def test_the_running_requests_of_a_node_that_leaves_move(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    sender, receiver = await serving(running)
    running.server.nodes.leave(sender.name, 1)
    result = await asking
    report = result["usage"]["headrace"]
    assert (text_of(result), report["moves"], report["decode"]["node"]) == (TEXT, 1, receiver.name)
    await assert_idle(running)


async def test_a_drain_of_the_last_decode_node_or_of_nobody_is_refused(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer, eos_id=0))
    for node, status, code in (("d0", 409, "last_decode_node"), ("d9", 404, "node_not_found")):
        reply = await running.http.post(f"/cluster/nodes/{node}/drain", json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert text_of(await ask(running)) == TEXT, "a node whose drain was refused gets work"
