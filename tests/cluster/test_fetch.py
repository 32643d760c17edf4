"""A prefill node fetches from a decode node in another process; that one dies, stops, or knows nothing of it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.request import Request
from headrace.wire.client import GrpcNodeClient
from headrace.wire.messages import FetchSource
from headrace.wire.node_messages import NodeStatus
from node.config import NodeConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.cluster import SMALL, Process, with_engine
from tests.support.cluster.nodes import decode_alone, first_token, node_client, status_of, total
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ALWAYS = FetchConfig(min_tokens=1, max_time_ratio=1e9, timeout_s=PATIENCE_S)
TURN, NEW = random_prompt(40, seed=21), random_prompt(30, seed=22)
ANSWER_TOKENS = 72
KNOWN = 96  # of the 111 tokens that the decode node computes: its newest checkpoint
NUM_BUSY = 8


@dataclass
class Pair:
    """A prefill node and a decode node that are told of each other by nobody but the test."""

    p0: Process
    d0: Process
    prefill: GrpcNodeClient
    decode: GrpcNodeClient

    def fetch_source(self, num_tokens: int, block_size: int = 16) -> FetchSource:
        return FetchSource("d0", self.d0.ready["address"], num_tokens, block_size)

    async def prefill_status(self) -> NodeStatus:
        return await status_of(self.p0.ready["address"])

    async def settled(self, *processes: Process) -> None:
        """Until nothing is held any more on these nodes."""
        for process in processes or (self.p0, self.d0):
            async with asyncio.timeout(PATIENCE_S):
                while _held(status := await status_of(process.ready["address"])):
                    await asyncio.sleep(0.02)
            for pool in (status.blocks, status.slots):
                assert pool.free + pool.cached == pool.total


def _held(status: NodeStatus) -> int:
    return status.blocks.in_use + status.slots.in_use + status.running + status.waiting


@asynccontextmanager
async def pair(
    model: Path, folder: Path, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[Pair]:
    common: dict[str, Any] = {"model_path": str(model), "engine": SMALL}
    with ExitStack() as processes:
        p0 = Process.start(
            "p0", NodeConfig(**{"name": "p0", "fetch_from_others": ALWAYS} | common | (prefill or {})), folder
        )
        processes.callback(p0.stop)
        d0 = Process.start("d0", NodeConfig(**{"name": "d0"} | common | (decode or {})), folder)
        processes.callback(d0.stop)
        async with node_client("p0", p0.ready["address"]) as to_p0, node_client("d0", d0.ready["address"]) as to_d0:
            yield Pair(p0, d0, to_p0, to_d0)


@pytest.fixture(params=["granite", "qwen35"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    """Both where something is fetched that is used; either, in turn, where nothing is."""
    return tiny_checkpoint(request.param)


def answered(**changes: Any) -> Request:
    return replace(request(TURN, replace(GREEDY, max_tokens=ANSWER_TOKENS)), **changes)


def next_turn(answer: list[int]) -> Request:
    return request([*TURN, *answer, *NEW])


async def test_the_answer_is_fetched_and_the_new_turn_computed(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN))
        assert token == greedy(model, prompt.tokens, 1)[0]
        assert (report.fetched_tokens, report.computed_tokens) == (KNOWN, len(prompt.tokens) - KNOWN)
        await nodes.settled()
        again, report = await first_token(nodes.prefill, request([*prompt.tokens[: KNOWN + 6], 7]), None)
        assert again == greedy(model, [*prompt.tokens[: KNOWN + 6], 7], 1)[0]
        assert report.state_hit_tokens == KNOWN, "what was fetched is found again"


@pytest.mark.parametrize("model", ["granite"], indirect=True)
async def test_a_checkpoint_that_was_evicted_costs_no_token(model: Path, tmp_path: Path) -> None:
    # A slot for what runs, one for what it writes next, and one checkpoint: the next request evicts it.
    async with pair(model, tmp_path, decode={"engine": with_engine(cache_bytes=1 << 20)}) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        slots = (await status_of(nodes.d0.ready["address"])).slots.total
        for number in range(slots):
            await decode_alone(nodes.decode, request(random_prompt(33, seed=100 + number)))
        token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN))
        assert token == greedy(model, prompt.tokens, 1)[0]
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(prompt.tokens))
        assert (await nodes.prefill_status()).counters["cause=gone/fetch_failures"] == 1
        await nodes.settled()


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
async def test_a_source_that_is_dead_costs_no_token(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        nodes.d0.kill()
        nodes.d0.wait()
        token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN))
        assert token == greedy(model, prompt.tokens, 1)[0]
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(prompt.tokens))
        assert (await nodes.prefill_status()).counters["cause=fetch_source_lost/fetch_failures"] == 1
        await nodes.settled(nodes.p0)


@asynccontextmanager
async def slow_fetch(
    model: Path, folder: Path
) -> AsyncIterator[tuple[Pair, Request, asyncio.Task[Any], Callable[[], Coroutine[Any, Any, None]]]]:
    """A fetch of more than 120 messages, some of which have arrived: each waits for a step of a busy decode node.

    Yields the nodes, what is asked, the task that asks it, and how to end what keeps the decode node busy.
    """
    one_block = {"max_message_bytes": 1 << 14}
    async with pair(model, folder, prefill=one_block, decode=one_block) as nodes:
        prompt = request(random_prompt(2000, seed=23))
        await decode_alone(nodes.decode, request(list(prompt.tokens[:1985]), replace(GREEDY, max_tokens=1)))
        busy = [
            asyncio.create_task(decode_alone(nodes.decode, request([number + 5], replace(GREEDY, max_tokens=4000))))
            for number in range(NUM_BUSY)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while (await status_of(nodes.d0.ready["address"])).running < NUM_BUSY:
                await asyncio.sleep(0.01)
        asking = asyncio.create_task(first_token(nodes.prefill, prompt, nodes.fetch_source(1984)))

        async def stop() -> None:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

        try:
            async with asyncio.timeout(PATIENCE_S):
                while (await nodes.prefill_status()).counters["transfer_received_bytes"] < 4 << 14:
                    assert not asking.done(), "the fetch was over before anybody looked"
            yield nodes, prompt, asking, stop
        finally:
            await stop()


async def test_a_source_killed_while_it_sends_costs_no_token(model: Path, tmp_path: Path) -> None:
    async with slow_fetch(model, tmp_path) as (nodes, prompt, asking, _):
        nodes.d0.kill()
        token, report = await asking
        assert token == greedy(model, prompt.tokens, 1)[0]
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(prompt.tokens))
        counters = (await nodes.prefill_status()).counters
        assert (counters["fetches"], total(counters, "fetch_failures")) == (0, 1)
        await nodes.settled(nodes.p0)
        nodes.d0.wait()


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
async def test_an_abort_while_it_sends_gives_everything_back_on_both(model: Path, tmp_path: Path) -> None:
    async with slow_fetch(model, tmp_path) as (nodes, _, asking, stop):
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await nodes.settled(nodes.p0)
        await stop()
        await nodes.settled()


@pytest.mark.parametrize("model", ["granite"], indirect=True)
async def test_a_source_that_says_nothing_is_given_up_at_the_fetchs_deadline(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path, prefill={"fetch_from_others": replace(ALWAYS, timeout_s=1.0)}) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        nodes.d0.kill(signal.SIGSTOP)
        try:
            async with asyncio.timeout(PATIENCE_S):
                token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN))
        finally:
            nodes.d0.kill(signal.SIGCONT)
        assert token == greedy(model, prompt.tokens, 1)[0]
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(prompt.tokens))
        assert (await nodes.prefill_status()).counters["cause=deadline/fetch_failures"] == 1
        await nodes.settled()


async def test_blocks_of_another_size_are_fetched_in_ones_own(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path, decode={"engine": with_engine(block_size=32)}) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN, block_size=32))
        assert (token, report.fetched_tokens) == (greedy(model, prompt.tokens, 1)[0], KNOWN)
        await nodes.settled()


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
async def test_a_source_of_another_model_refuses(model: Path, tmp_path: Path, tiny_checkpoint) -> None:
    other = tiny_checkpoint("granite_moe")
    async with pair(model, tmp_path, decode={"model_path": str(other)}) as nodes:
        prompt = next_turn(await decode_alone(nodes.decode, answered()))
        token, report = await first_token(nodes.prefill, prompt, nodes.fetch_source(KNOWN))
        assert (token, report.fetched_tokens) == (greedy(model, prompt.tokens, 1)[0], 0)
        assert (await nodes.prefill_status()).counters["cause=refused/fetch_failures"] == 1
        assert "fingerprint" in nodes.p0.log.read_text()
        await nodes.settled()
