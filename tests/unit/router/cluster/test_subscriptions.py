"""The router follows the caches of registered nodes, and names fetch sources by them."""

import asyncio
from typing import Any

import pytest

from headrace.cache.hashing import prefix_keys
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart, CacheUpdate
from headrace.wire.errors import NodeLost
from headrace.wire.node_messages import Role
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, fake_cluster, fetch_source, node_info, node_status
from tests.unit.router.conftest import Running, StartRouter

PROMPT = list(range(5, 5 + 70))
KEYS = tuple(prefix_keys(PROMPT, 16))
ALL = CacheSnapshotPart(1, 9, KEYS, (KEYS[2],), True)


def publish(running: Running, name: str, *updates: CacheUpdate | NodeLost) -> None:
    for update in updates:
        running.cluster.nodes[name].updates.put_nowait(update)


async def indexes(running: Running) -> dict[str, Any]:
    nodes = (await running.http.get("/cluster")).json()["nodes"]
    return {node["name"]: node["index"] for node in nodes}


async def until(running: Running, name: str, **expected: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not expected.items() <= (await indexes(running)).get(name, {}).items():
            await asyncio.sleep(0.02)


async def ask(running: Running, **more: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, **more}
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


@pytest.fixture
async def running(start_router: StartRouter) -> Running:
    return await start_router(fake_cluster([1, 2, 3], prefill=1, decode=2))


async def test_cluster_shows_what_is_known_of_each_node(running: Running) -> None:
    nothing = {"blocks": 0, "checkpoints": 0, "sequence": None, "is_followed": False, "lag": 0}
    assert await indexes(running) == {"d0": nothing, "d1": nothing, "p0": nothing}
    publish(running, "d0", ALL, CacheChanges(1, 10, ((CacheChange.CHECKPOINT_STORED, KEYS[3]),)))
    await until(running, "d0", blocks=4, checkpoints=2, sequence=10, is_followed=True)
    assert (await indexes(running))["d1"] == nothing
    text = (await running.http.get("/metrics")).text
    assert 'headrace_index_keys{group="state",node="d0",role="decode"} 2.0' in text
    assert 'headrace_index_followed{node="d0",role="decode"} 1.0' in text
    assert 'headrace_index_followed{node="p0",role="prefill"} 0.0' in text


async def test_lag_counts_the_changes_of_the_heartbeat_that_have_not_arrived(running: Running) -> None:
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9, lag=0)
    status = node_status()
    running.server.nodes.register(
        node_info("d0", Role.DECODE), type(status)(0, 0, status.blocks, status.slots, {"cache_changes": 12.0})
    )
    assert (await indexes(running))["d0"]["lag"] == 3


@pytest.mark.parametrize(
    "breaks",
    [
        NodeLost("d0", "eof"),
        CacheChanges(1, 12, ((CacheChange.BLOCK_EVICTED, KEYS[0]),)),  # a gap
        CacheChanges(2, 10, ((CacheChange.BLOCK_EVICTED, KEYS[0]),)),  # another incarnation
    ],
)
async def test_whatever_breaks_the_stream_it_subscribes_again(running: Running, breaks: Any) -> None:
    node = running.cluster.nodes["d0"]
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9)
    assert node.num_subscriptions == 1
    publish(running, "d0", breaks)
    await until(running, "d0", is_followed=False, blocks=4)  # what was known is still a hint
    publish(running, "d0", CacheSnapshotPart(1, 20, (KEYS[0],), (), True))
    await until(running, "d0", sequence=20, blocks=1, checkpoints=0, is_followed=True)
    assert node.num_subscriptions == 2


async def test_a_node_that_goes_is_forgotten_and_its_call_left(running: Running) -> None:
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9)
    running.server.nodes.leave("d0", 1)
    assert set(await indexes(running)) == {"d1", "p0"}
    async with asyncio.timeout(PATIENCE_S):
        while not running.cluster.nodes["d0"].closed:  # which it is not before the call is left
            await asyncio.sleep(0.02)
    assert len(running.server.index) == 2


async def test_a_node_that_comes_back_as_it_was_is_followed_again(running: Running) -> None:
    """It only missed heartbeats: the end of the first task must not touch the second one's index."""
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9)
    running.server.nodes.leave("d0", 1)
    running.server.nodes.register(node_info("d0", Role.DECODE), node_status())
    assert (await indexes(running))["d0"]["sequence"] is None
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9, blocks=4, is_followed=True)
    assert len(running.server.index) == 3


async def test_a_restarted_node_is_followed_from_its_own_snapshot(running: Running) -> None:
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9)
    running.server.nodes.register(node_info("d0", Role.DECODE, incarnation=2), node_status())
    await until(running, "d0", sequence=None, blocks=0)
    publish(running, "d0", CacheSnapshotPart(2, 3, KEYS[:1], (), True))
    await until(running, "d0", sequence=3, blocks=1)


async def test_a_prefill_request_names_the_node_that_holds_more(running: Running) -> None:
    prefill = running.cluster.nodes["p0"]
    await ask(running, headrace={"salt": "nobody holds anything"})
    publish(running, "p0", CacheSnapshotPart(1, 3, KEYS[:2], (KEYS[0],), True))
    publish(running, "d1", ALL)
    await until(running, "d1", sequence=9)
    await until(running, "p0", sequence=3)
    await ask(running)
    await ask(running, headrace={"salt": "another tenant"})
    stored = ((CacheChange.BLOCK_STORED, KEYS[2]), (CacheChange.CHECKPOINT_STORED, KEYS[2]))
    publish(running, "p0", CacheChanges(1, 4, stored))
    await until(running, "p0", sequence=5)
    await ask(running)
    assert prefill.fetch_sources == [None, fetch_source("d1", 48), None, None]


async def test_a_suspect_is_no_fetch_source(running: Running) -> None:
    publish(running, "d1", ALL)
    await until(running, "d1", sequence=9)
    (node,) = [node for node in running.server.nodes.all() if node.info.name == "d1"]
    node.suspect = True
    await ask(running)
    assert running.cluster.nodes["p0"].fetch_sources == [None]


async def test_fetching_can_be_turned_off(start_router: StartRouter) -> None:
    cluster: FakeCluster = fake_cluster([1, 2, 3])
    running = await start_router(cluster, fetch_from_others=False)
    publish(running, "d0", ALL)
    await until(running, "d0", sequence=9)
    await ask(running)
    assert cluster.nodes["p0"].fetch_sources == [None]
