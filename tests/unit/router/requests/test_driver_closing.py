"""A request is closed in the router's table whatever cancels its driver, and at which moment."""

import asyncio
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeTable
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.requests.admission import Admission
from router.requests.context import RouterContext
from router.requests.driver import RequestDriver
from router.requests.outputs import Output
from router.requests.states import RequestPhase
from router.requests.table import RequestTable
from router.routing.ledger import Ledger
from router.routing.policies.round_robin import RoundRobin
from router.routing.snapshots import Snapshots
from tests.support.patience import PATIENCE_S
from tests.support.router import hanging_up
from tests.support.router.fake_nodes import FakeCluster, fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import decode_node

REQUESTS_ENDED = "headrace_requests_total"


class Unread:
    """A client that takes everything and looks at nothing."""

    is_complete, has_room = False, True

    def put(self, output: Output) -> None: ...

    async def room(self) -> None: ...


def context_of(cluster: FakeCluster, model_folder: Path) -> RouterContext:
    nodes, index = NodeTable(60.0, time.monotonic, cluster.connect), ClusterIndex()
    ledger = Ledger()
    snapshots = Snapshots(index, ledger)
    nodes.watch_status(lambda node: snapshots.heartbeat(node.info, node.status, 0.0))
    for info in cluster.infos():
        nodes.register(info, node_status())
    config, table, metrics = RouterConfig(model_folder), RequestTable(), RouterMetrics()
    return RouterContext(config, nodes, table, RoundRobin(), ledger, snapshots, metrics, index, time.monotonic)


@pytest.mark.parametrize("is_decoding", [True, False])
async def test_a_cancellation_at_any_moment_of_leaving_closes_the_request(model_folder: Path, is_decoding: bool):
    cluster = fake_cluster([5, 6, 7])
    context = context_of(cluster, model_folder)
    admission = Admission(1, 0)
    node = decode_node(cluster, "d0")
    for num_turns in range(12):  # 0: before the block is left; the last ones: after
        node.gate = asyncio.Semaphore(0) if is_decoding else None
        may_leave = asyncio.Event()
        request = Request(f"r{num_turns}", TokenArray.of((1, 2)), 2, Sampling(max_tokens=4, seed=0))
        (permit,) = admission.acquire("client", [request])
        driver = RequestDriver(context, request, permit, Unread())

        async def use(driver: RequestDriver = driver, may_leave: asyncio.Event = may_leave) -> None:
            async with driver:
                await may_leave.wait()

        task = asyncio.create_task(use())
        async with asyncio.timeout(PATIENCE_S):
            while driver.life.phase not in (RequestPhase.DECODING, RequestPhase.DONE):
                await asyncio.sleep(0)
        may_leave.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        open_phases = {phase for phase, count in context.table.counts().items() if count}
        assert open_phases <= {RequestPhase.DONE, RequestPhase.FAILED}, f"cancelled after {num_turns} turns"
        async with asyncio.timeout(PATIENCE_S):
            while node.open_calls:
                await asyncio.sleep(0)
        assert sum(context.table.ended.values()) == num_turns + 1


async def test_clients_that_hang_up_at_the_last_chunk_leave_nothing_behind(start_router: StartRouter):
    """Sixteen choices are closed one after the other, so that nearly every such client leaves meanwhile."""
    cluster = fake_cluster([5, 6, 7])
    decode_node(cluster, "d0").step_s = 0.001
    running = await start_router(cluster)
    tries = 20
    port = running.server.url.rsplit(":", 1)[1]
    client = await asyncio.create_subprocess_exec(sys.executable, hanging_up.__file__, port, str(tries))
    assert await client.wait() == 0
    await assert_ended(running, tries * hanging_up.NUM_CHOICES)


async def assert_ended(running: Running, count: int) -> None:
    """Asserts that so many requests end and are counted; one that is left in the table is never counted."""
    ended = 0.0
    async with asyncio.timeout(PATIENCE_S):
        while ended < count:
            metrics = text_string_to_metric_families((await running.http.get("/metrics")).text)
            ended = sum(each.value for family in metrics for each in family.samples if each.name == REQUESTS_ENDED)
    assert ended == count
