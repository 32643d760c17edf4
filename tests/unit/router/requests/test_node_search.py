"""The choice of nodes for a request: busy nodes, failed nodes, and nodes that cannot transfer to each other."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.request import Request
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeLost, TransferBroken
from tests.support.router.fake_nodes import FakeCluster, Fault, fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, text_of


class AlwaysTheFirst:
    def pick(self, candidates: Sequence[m.NodeInfo], request: Request) -> m.NodeInfo:
        return candidates[0]


async def test_after_a_failed_transfer_another_prefill_node_is_asked(start_router: StartRouter, answer: list[int]):
    """A stopped prefill node reports nothing: the decode node reports the failure, at the session's deadline."""
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(TransferBroken("d0", "deadline"))]
    running = await start_router(cluster, new_policy=AlwaysTheFirst)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["prefill"]["node"] == "p1"


async def test_a_busy_decode_node_passes_the_request_on(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))]
    running = await start_router(cluster)
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 0)


async def test_a_node_that_stays_busy_is_waited_for(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 5
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT


async def test_patience_with_busy_nodes_ends_in_503(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 1000
    running = await start_router(cluster, busy_timeout_s=0.3)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert "every decode node stayed busy for 0.3 s" in reply.json()["error"]["message"]
    await assert_idle(running)


# ------------------------------------------------------------ nodes that can transfer to each other

ANSWER = [5, 6, 7, 8]
ASKS = 6


async def start(start_router: StartRouter, cluster: FakeCluster, devices: dict[str, str]) -> Running:
    running = await start_router(cluster, register=False)
    for info in cluster.infos():
        running.server.nodes.register(replace(info, device=devices[info.name]), node_status())
    return running


async def path_of_answer(running: Running) -> tuple[str, str | None, str]:
    """The path, and the nodes that the answer came from."""
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True, "headrace": {"report": True}}
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    result = reply.json()
    assert result["choices"][0]["token_ids"] == ANSWER
    report = result["usage"]["headrace"]
    return report["path"], (report["prefill"] or {}).get("node"), report["decode"]["node"]


async def test_each_decode_node_is_served_by_prefill_nodes_of_its_kind(start_router: StartRouter):
    devices = {"p0": "cpu", "p1": "cuda", "d0": "cuda", "d1": "cpu"}
    running = await start(start_router, fake_cluster(ANSWER, prefill=2, decode=2), devices)
    paths = {await path_of_answer(running) for _ in range(ASKS)}
    assert paths == {("remote", "p1", "d0"), ("remote", "p0", "d1")}


async def test_a_decode_node_without_a_prefill_node_of_its_kind_does_it_all(start_router: StartRouter):
    devices = {"p0": "cpu", "d0": "cuda", "d1": "cpu"}
    running = await start(start_router, fake_cluster(ANSWER, decode=2), devices)
    paths = {await path_of_answer(running) for _ in range(ASKS)}
    assert {(path, decode) for path, _, decode in paths} == {("local", "d0"), ("remote", "d1")}


async def test_a_request_whose_only_fitting_prefill_node_is_lost_goes_on_without(start_router: StartRouter):
    cluster = fake_cluster(ANSWER, prefill=2)
    cluster.nodes["p0"].faults = [Fault(NodeLost("p0", "gone"))]
    running = await start(start_router, cluster, {"p0": "cpu", "p1": "cuda", "d0": "cpu"})
    path, _, decode = await path_of_answer(running)
    assert (path, decode) == ("local", "d0")
    assert cluster.nodes["p1"].requests == []


async def test_a_prefill_node_whose_link_check_failed_is_asked_after_the_others(start_router: StartRouter):
    cluster = fake_cluster(ANSWER, prefill=2)
    running = await start(start_router, cluster, {"p0": "cpu", "p1": "cpu", "d0": "cpu"})
    broken = replace(node_status(), links=(m.LinkStatus("d0", error="nobody is there"),))
    p0 = next(info for info in cluster.infos() if info.name == "p0")
    running.server.nodes.register(p0, broken)
    assert {await path_of_answer(running) for _ in range(ASKS)} == {("remote", "p1", "d0")}
    cluster.nodes["p1"].faults = [Fault(NodeLost("p1", "gone"))]
    assert await path_of_answer(running) == ("remote", "p0", "d0"), "its last link check may be out of date"
