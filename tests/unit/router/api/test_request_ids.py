"""x-request-id: checked, echoed, and the base of the ids and seeds of the requests."""

import asyncio
import re
from dataclasses import replace

import httpx
import pytest

from headrace.request import Request
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeDecodeNode, fake_cluster
from tests.unit.router.conftest import Running, StartRouter

BODY = {"prompt": "a", "max_tokens": 3}


@pytest.fixture
async def running(start_router: StartRouter) -> Running:
    return await start_router(fake_cluster([7, 8, 9], prefill=0))


def decode_node(running: Running) -> FakeDecodeNode:
    node = running.cluster.nodes["d0"]
    assert isinstance(node, FakeDecodeNode)
    return node


async def post(running: Running, request_id: str | None = None, **more: object) -> httpx.Response:
    headers = {} if request_id is None else {"x-request-id": request_id}
    return await running.http.post("/v1/completions", json=BODY | more, headers=headers)


async def requests_of(running: Running, *ids: str | None, **more: object) -> list[Request]:
    """The requests that the node got for one HTTP request with each of these ids."""
    node = decode_node(running)
    before = len(node.requests)
    for request_id in ids:
        assert (await post(running, request_id, **more)).status_code == 200
    return node.requests[before:]


async def test_a_clients_id_is_echoed_and_names_its_requests(running: Running) -> None:
    reply = await post(running, "order/17:a=b+c-d_e.f", n=2)
    assert reply.headers["x-request-id"] == "order/17:a=b+c-d_e.f"
    assert reply.json()["id"] == "cmpl-order/17:a=b+c-d_e.f"
    ids = [request.request_id for request in decode_node(running).requests]
    assert ids == ["cmpl-order/17:a=b+c-d_e.f-0", "cmpl-order/17:a=b+c-d_e.f-1"]


async def test_without_one_the_router_makes_one_for_every_answer(running: Running) -> None:
    made = [(await post(running)).headers["x-request-id"] for _ in range(2)]
    made.append((await running.http.get("/health")).headers["x-request-id"])
    made.append((await running.http.get("/nope")).headers["x-request-id"])
    assert len(set(made)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    assert [request.request_id for request in decode_node(running).requests] == [
        f"cmpl-{made[0]}-0",
        f"cmpl-{made[1]}-0",
    ]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a,b", 'a"b'])
async def test_an_id_of_other_characters_or_too_many_is_refused(running: Running, given: str) -> None:
    reply = await post(running, given)
    assert reply.status_code == 400
    assert "use 1 to 128 letters, digits, or characters of" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"] != given
    assert decode_node(running).requests == []


async def test_an_id_that_is_in_use_is_409_and_does_not_disturb_the_first(running: Running) -> None:
    node = decode_node(running)
    node.gate = asyncio.Semaphore(0)
    first = asyncio.create_task(post(running, "one"))
    async with asyncio.timeout(PATIENCE_S):
        while not node.requests:
            await asyncio.sleep(0.005)
    second = await post(running, "one")
    assert (second.status_code, second.json()["error"]["code"]) == (409, "request_id_in_use")
    assert second.headers["retry-after"] == "1"
    for _ in range(20):
        node.gate.release()
    other_tenant = await post(running, "one", headrace={"salt": "another"})
    assert (other_tenant.status_code, (await first).status_code) == (200, 200)
    assert (await post(running, "one")).status_code == 200, "it is free again"


async def test_seeds_of_one_id_agree_unless_the_client_gives_one(running: Running) -> None:
    one, again, other = await requests_of(running, "one", "one", "other")
    assert replace(one, age_s=0) == replace(again, age_s=0)
    assert one.sampling.seed != other.sampling.seed
    first, second = await requests_of(running, "one", n=2)
    assert (first.sampling.seed, second.sampling.seed) == (one.sampling.seed, (one.sampling.seed + 1) % 2**64)
    (seeded,) = await requests_of(running, "one", seed=5)
    assert seeded.sampling.seed == 5
    drawn, drawn_again = await requests_of(running, None, None)
    assert drawn.sampling.seed != drawn_again.sampling.seed


async def test_only_requests_that_can_be_asked_for_again_are_resumable(running: Running) -> None:
    (given,) = await requests_of(running, "one")
    (made,) = await requests_of(running, None)
    (with_logprobs,) = await requests_of(running, "one", logprobs=1)
    (scored,) = await requests_of(running, "one", logprobs=1, echo=True)
    resumable = [each.is_resumable for each in (given, made, with_logprobs, scored)]
    assert resumable == [True, False, True, False]


async def test_the_id_of_another_tenant_is_another_id(running: Running) -> None:
    (mine,) = await requests_of(running, "one", headrace={"salt": "mine"})
    (theirs,) = await requests_of(running, "one", headrace={"salt": "theirs"})
    (nobodys,) = await requests_of(running, "one")
    assert len({mine.request_id, theirs.request_id, nobodys.request_id}) == 3
