"""Late nodes are asked before they are taken for dead."""

import asyncio
import time
from collections.abc import Callable

from headrace.wire.node_messages import Role
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import StartRouter

HEARTBEAT_S = 0.1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_node_without_heartbeats_stays_while_it_answers(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1], prefill=0), heartbeat_s=HEARTBEAT_S)
    (node,) = running.server.nodes.all()
    await until(lambda: running.cluster.nodes["d0"].num_questions >= 5)
    assert running.server.nodes.live(Role.DECODE) == [node]
    reply = await running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert reply.status_code == 200


async def test_a_router_that_stood_still_takes_no_node_for_dead(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1]), heartbeat_s=HEARTBEAT_S)
    before = running.server.nodes.all()
    time.sleep(10 * HEARTBEAT_S)  # the event loop stands still: no heartbeat is read, no question asked
    assert (await running.http.get("/ready")).status_code == 200
    asked = {name: node.num_questions for name, node in running.cluster.nodes.items()}
    await until(lambda: all(node.num_questions > asked[name] for name, node in running.cluster.nodes.items()))
    assert running.server.nodes.all() == before


async def test_a_node_that_takes_its_time_to_answer_gets_no_work_but_stays(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1], prefill=0), heartbeat_s=HEARTBEAT_S)
    nodes, fake = running.server.nodes, running.cluster.nodes["d0"]
    assert fake.answers is not None
    fake.answers.clear()
    (node,) = nodes.all()
    await until(lambda: not nodes.live(Role.DECODE))
    await asyncio.sleep(4 * HEARTBEAT_S)  # three missed heartbeats are past
    assert (nodes.all(), fake.num_questions) == ([node], 1)
    fake.answers.set()
    await until(lambda: nodes.live(Role.DECODE) == [node])


async def test_a_request_on_a_node_that_is_taken_for_dead_goes_on(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([7, 8, 9], prefill=0), heartbeat_s=HEARTBEAT_S)
    nodes, fake = running.server.nodes, running.cluster.nodes["d0"]
    fake.gate, fake.answers = asyncio.Semaphore(1), None
    body = {"prompt": "a", "max_tokens": 3, "return_token_ids": True}
    asking = asyncio.create_task(running.http.post("/v1/completions", json=body))
    await until(lambda: nodes.all() == [])
    assert not fake.closed
    for _ in range(2):
        fake.gate.release()
    answer = (await asking).json()
    assert answer["choices"][0]["token_ids"] == [7, 8, 9]
    await until(lambda: fake.closed)


async def test_an_open_question_ends_with_the_router(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1], prefill=0), heartbeat_s=HEARTBEAT_S)
    fake = running.cluster.nodes["d0"]
    assert fake.answers is not None
    fake.answers.clear()
    await until(lambda: fake.num_questions == 1)
    await running.server.stop()
    assert fake.closed
