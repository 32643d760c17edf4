"""A prefill node fetches a prefix while its request holds a reservation: nodes die, clients leave, deadlines pass.

The request's target is d0, whose turn it is first; its fetch source is d0 as well, or d1. What happens, happens in the
middle of the fetch: the fetch source is stopped when some messages have arrived.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.models.weights import load_config
from headrace.wire.node_messages import NodeStatus
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ASK_TIMEOUT_S, Answered, ask
from tests.support.cluster.cluster import SMALL, Cluster, Process
from tests.support.cluster.nodes import decode_alone, node_client, status_of, total, until_the_router_knows
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

FETCH_TIMEOUT_S = 10 * PATIENCE_S  # longer than any test waits: nothing here ends because of it
PROMPT = random_prompt(2000, seed=24)
KNOWN = 1984  # what the fetch source holds of it, with a checkpoint there
ANSWER_TOKENS = 32
NUM_BUSY = (
    8  # requests that the fetch source answers meanwhile: each of the fetch's 125 messages waits for a step of theirs
)


@dataclass
class Moving:
    """A request in the middle of its fetch, and who makes its fetch source slow."""

    cluster: Cluster
    fetch_source: Process
    asking: asyncio.Task[Answered]
    busy: list[asyncio.Task[Any]]

    def thaw(self) -> None:
        """The fetch source goes on, as slow as before."""
        self.fetch_source.kill(signal.SIGCONT)

    async def calm(self) -> None:
        """Nothing makes the fetch source slow any more."""
        await _end(*self.busy)

    async def status(self, name: str) -> NodeStatus:
        return await status_of(self.cluster.processes[name].ready["address"])

    async def counter(self, name: str, counter: str) -> float:
        """Over all its labels."""
        return total((await self.status(name)).counters, counter)

    async def answer(self) -> Answered:
        async with asyncio.timeout(PATIENCE_S):
            return await self.asking

    async def given_back(self, *names: str) -> None:
        """Until nothing is held any more on these nodes."""
        for name in names:
            async with asyncio.timeout(PATIENCE_S):
                while _held(status := await self.status(name)):
                    await asyncio.sleep(0.02)
            for pool in (status.blocks, status.slots):
                assert pool.free + pool.cached == pool.total


def _held(status: NodeStatus) -> int:
    return status.blocks.in_use + status.slots.in_use + status.running + status.waiting


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def moving(model: Path, folder: Path, fetch_source: str, **changes: Any) -> AsyncIterator[Moving]:
    """`changes` are the cluster's, on top of what makes the fetch slow."""
    learn = FetchConfig(min_tokens=1, max_time_ratio=1e9, timeout_s=FETCH_TIMEOUT_S)
    block_bytes = load_config(model).cache_layout("any", SMALL.model_dtype, SMALL.block_size).block_bytes
    one_block: dict[str, Any] = {"max_message_bytes": block_bytes}
    decode, prefill = one_block | changes.pop("decode", {}), one_block | {"fetch_from_others": learn}
    with Cluster(model, folder, prefill=prefill, decode=decode, **changes) as cluster:
        process = cluster.processes[fetch_source]
        address = process.ready["address"]
        async with (
            node_client(fetch_source, address) as to_fetch_source,
            httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client,
        ):
            await decode_alone(to_fetch_source, request(PROMPT[: KNOWN + 1], replace(GREEDY, max_tokens=1)))
            await until_the_router_knows(cluster)
            long = replace(GREEDY, max_tokens=4000)
            busy = [asyncio.create_task(decode_alone(to_fetch_source, request([7 + i], long))) for i in range(NUM_BUSY)]
            async with asyncio.timeout(PATIENCE_S):
                while (await status_of(address)).running < NUM_BUSY:
                    await asyncio.sleep(0.01)
            asking = asyncio.create_task(ask(client, PROMPT, ANSWER_TOKENS))
            nodes = Moving(cluster, process, asking, busy)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while await nodes.counter("p0", "transfer_received_bytes") < 4 * block_bytes:
                        assert not asking.done(), "no fetch, or it was over before anybody looked"
                process.kill(signal.SIGSTOP)
                assert await nodes.counter("p0", "fetches") == 0, "it was stopped too late"
                yield nodes
            finally:
                await _end(asking, *busy)


@pytest.fixture(params=["granite", "qwen35"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    """Both where what was fetched is handed on; either, in turn, where the fetch is lost or only late."""
    return tiny_checkpoint(request.param)


@pytest.mark.parametrize("model", ["granite"], indirect=True)
async def test_a_source_that_is_the_target_too_dies_and_the_request_goes_on_elsewhere(model, tmp_path) -> None:
    async with moving(model, tmp_path, "d0", num_decode=2) as nodes:
        nodes.cluster.processes["d0"].kill()
        answer = await nodes.answer()
        assert answer.tokens == greedy(model, PROMPT, ANSWER_TOKENS)
        assert (answer.report["decode"]["node"], answer.report["migrations"]) == ("d1", 1)
        assert answer.report["prefill"]["fetched_tokens"] == 0
        assert await nodes.counter("p0", "fetches") == 0
        await nodes.given_back("p0", "d1")


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
async def test_a_source_dies_and_the_target_gets_what_was_computed(model, tmp_path) -> None:
    async with moving(model, tmp_path, "d1", num_decode=2) as nodes:
        nodes.cluster.processes["d1"].kill()
        answer = await nodes.answer()
        assert answer.tokens == greedy(model, PROMPT, ANSWER_TOKENS)
        assert (answer.report["path"], answer.report["decode"]["node"]) == ("remote", "d0")
        assert answer.report["migrations"] == 0, "its reservation outlived the fetch"
        prefill = answer.report["prefill"]
        assert (prefill["fetched_tokens"], prefill["computed_tokens"]) == (0, len(PROMPT))
        assert await nodes.counter("p0", "fetch_failures") == 1
        await nodes.given_back("p0", "d0")


@pytest.mark.parametrize("fetch_source", ["d0", "d1"])
async def test_a_client_leaves_and_every_node_gives_back(fetch_source, tiny_checkpoint, tmp_path) -> None:
    async with moving(tiny_checkpoint("qwen35"), tmp_path, fetch_source, num_decode=2) as nodes:
        nodes.asking.cancel()
        await nodes.given_back(*{"p0", "d0", "d1"} - {fetch_source})  # nobody waits for the fetch source
        nodes.thaw()
        ended = 2 if fetch_source == "d0" else 1  # its export, and as the target the reservation
        async with asyncio.timeout(PATIENCE_S):
            while await nodes.counter(fetch_source, "transfer_failures") < ended:
                await asyncio.sleep(0.02)
        await nodes.calm()
        await nodes.given_back("p0", "d0", "d1")
        assert await nodes.counter("p0", "transfer_failures") == 1, "the fetch; the hand-over had not begun"


async def test_a_prefill_node_dies_and_another_fetches_for_the_renewed_reservation(model, tmp_path) -> None:
    async with moving(model, tmp_path, "d0", num_prefill=2) as nodes:
        nodes.cluster.processes["p0"].kill()
        nodes.thaw()
        await nodes.calm()
        answer = await nodes.answer()
        assert answer.tokens == greedy(model, PROMPT, ANSWER_TOKENS)
        assert (answer.report["decode"]["node"], answer.report["migrations"]) == ("d0", 0)
        prefill = answer.report["prefill"]
        assert (prefill["node"], prefill["fetched_tokens"]) == ("p1", KNOWN)
        assert await nodes.counter("d0", "fetches_served") == 1
        await nodes.given_back("p1", "d0")


@pytest.mark.parametrize("model", ["granite"], indirect=True)
async def test_a_reservation_does_not_run_out_while_the_source_stalls(model, tmp_path) -> None:
    timeout_s = 3.0  # twice that is less than heartbeats give a silent node: the fetch source is not taken for dead
    changes: dict[str, Any] = {"decode": {"reservation_timeout_s": timeout_s}, "router": {"heartbeat_s": 5.0}}
    async with moving(model, tmp_path, "d1", num_decode=2, **changes) as nodes:
        await asyncio.sleep(2 * timeout_s)
        await nodes.calm()
        nodes.thaw()
        answer = await nodes.answer()
        assert answer.tokens == greedy(model, PROMPT, ANSWER_TOKENS)
        assert (answer.report["decode"]["node"], answer.report["migrations"]) == ("d0", 0)
        assert answer.report["prefill"]["fetched_tokens"] == KNOWN
        assert await nodes.counter("d0", "transfer_failures") == 0
        await nodes.given_back("p0", "d0", "d1")
