"""Nodes that do the work of both roles: each prefills, decodes, sends to the other and receives from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.wire.client import GrpcNodeClient
from headrace.wire.messages import FetchSource
from node.config import NodeConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import ALWAYS_REMOTE, SMALL, Cluster, Process
from tests.support.cluster.nodes import decode_alone, first_token, handed_over, node_client, status_of
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import clear_prompt, greedy
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 24
ANSWER = replace(GREEDY, max_tokens=ANSWER_TOKENS)
ALWAYS = {"local_prefill": ALWAYS_REMOTE, "fetch_from_others": FetchConfig(min_tokens=1, max_time_ratio=1e9)}
NARROW = {"staging_buffers": 1, "max_message_bytes": 1 << 15}
"""One buffer for each direction: sessions in opposite directions wait for it all the time."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Path:
    return tiny_checkpoint("granite")


@dataclass(frozen=True)
class Two:
    """Two nodes without a router, and a client of each."""

    processes: tuple[Process, Process]
    clients: tuple[GrpcNodeClient, GrpcNodeClient]

    def fetch_source(self, number: int, num_tokens: int) -> FetchSource:
        return FetchSource(f"n{number}", self.processes[number].ready["address"], num_tokens, block_size=16)

    async def settled(self) -> None:
        """Returns once nothing is held any more on either node."""
        async with asyncio.timeout(PATIENCE_S):
            for process in self.processes:
                while (status := await status_of(process.ready["address"])).blocks.in_use or status.slots.in_use:
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def two_nodes(model: Path, folder: Path, **settings: Any) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        processes, clients = [], []
        for name in ("n0", "n1"):
            config = NodeConfig(**{"name": name, "model_path": str(model), "engine": SMALL} | ALWAYS | settings)
            processes.append(process := await asyncio.to_thread(Process.start, name, config, folder))
            stack.callback(process.stop)
            clients.append(await stack.enter_async_context(node_client(name, process.ready["address"])))
        yield Two((processes[0], processes[1]), (clients[0], clients[1]))


async def test_two_nodes_send_to_each_other_at_once_with_one_buffer_each_way(model, tmp_path) -> None:
    async with two_nodes(model, tmp_path, **NARROW) as two:
        prompts = [clear_prompt(model, 200 + seed, ANSWER_TOKENS, seed) for seed in range(16)]
        first, second = two.clients
        ways = [(first, second), (second, first)] * 8
        asked = [handed_over(*way, request(prompt, ANSWER)) for way, prompt in zip(ways, prompts, strict=True)]
        answers = await asyncio.gather(*asked)
        assert [tokens for tokens, _ in answers] == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
        await two.settled()
        for process in two.processes:
            counters = (await status_of(process.ready["address"])).counters
            assert counters["direction=sent/transfer_sessions"] == counters["direction=received/transfer_sessions"] == 8
            assert counters["staging_waits"] > 0


async def test_a_chats_turn_is_fetched_from_the_node_that_computed_it_whatever_it_did_then(model, tmp_path) -> None:
    """One that only prefilled it, and one that answered it; what fetches hands over to the very node that it fetched
    from."""
    async with two_nodes(model, tmp_path) as two:
        first, second = two.clients
        prompt = clear_prompt(model, 100, ANSWER_TOKENS, seed=3)
        token, _ = await first_token(first, request(prompt, replace(ANSWER, max_tokens=1)), None)
        assert token == greedy(model, prompt, 1)[0]
        tokens, report = await handed_over(second, first, request(prompt, ANSWER), two.fetch_source(0, 96))
        assert tokens == greedy(model, prompt, ANSWER_TOKENS)
        assert (report.fetched_tokens, report.computed_tokens) == (96, 4)
        turn = clear_prompt(model, 20, ANSWER_TOKENS, seed=4, after=[*prompt, *tokens])
        known = (len(prompt) + ANSWER_TOKENS - 1) // 16 * 16
        again, report = await handed_over(second, first, request(turn, ANSWER), two.fetch_source(0, known))
        assert again == greedy(model, turn, ANSWER_TOKENS)
        assert (report.fetched_tokens, report.computed_tokens) == (known - 96, len(turn) - known)
        await two.settled()


async def test_a_node_that_answers_alone_fetches_what_another_one_holds(model, tmp_path) -> None:
    async with two_nodes(model, tmp_path) as two:
        first, second = two.clients
        prompt = clear_prompt(model, 100, ANSWER_TOKENS, seed=3)
        tokens = await decode_alone(first, request(prompt, ANSWER))
        turn = clear_prompt(model, 20, ANSWER_TOKENS, seed=4, after=[*prompt, *tokens])
        known = (len(prompt) + ANSWER_TOKENS - 1) // 16 * 16
        assert await decode_alone(second, request(turn, ANSWER), two.fetch_source(0, known)) == greedy(
            model, turn, ANSWER_TOKENS
        )
        status = await status_of(two.processes[1].ready["address"])
        assert (status.counters["fetches"], status.counters["computed_tokens"]) == (
            1,
            len(turn) - known + ANSWER_TOKENS - 1,
        )
        gone = clear_prompt(model, 21, ANSWER_TOKENS, seed=5, after=turn)
        answer = await decode_alone(second, request(gone, ANSWER), two.fetch_source(0, known + 32))
        assert answer == greedy(model, gone, ANSWER_TOKENS), "a source that holds less costs no token"
        await two.settled()


async def test_a_node_that_starts_as_a_prefill_node_answers_alone(model, tmp_path) -> None:
    async with two_nodes(model, tmp_path, role="prefill") as two:
        prompts = [clear_prompt(model, length, ANSWER_TOKENS) for length in (1, 17, 200)]
        answers = [await decode_alone(two.clients[0], request(prompt, ANSWER)) for prompt in prompts]
        assert answers == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]


async def test_with_elastic_roles_a_prefill_node_answers_when_no_decode_node_is_left(model, tmp_path) -> None:
    with Cluster(model, tmp_path, router={"roles": "elastic"}) as cluster:
        prompt, other = (clear_prompt(model, length, ANSWER_TOKENS) for length in (40, 50))
        (divided,) = await ask_all(cluster.url, [prompt], at_once=1, num_tokens=ANSWER_TOKENS)
        cluster.processes.pop("d0").stop()
        (alone,) = await ask_all(cluster.url, [other], at_once=1, num_tokens=ANSWER_TOKENS)
        assert divided.tokens == greedy(model, prompt, ANSWER_TOKENS)
        assert alone.tokens == greedy(model, other, ANSWER_TOKENS)
        assert (alone.report["path"], alone.report["decode"]["node"]) == ("local", "p0")


async def test_undivided_nodes_answer_behind_a_router(model, tmp_path) -> None:
    with Cluster(model, tmp_path, num_prefill=0, num_decode=0, num_both=2) as cluster:
        prompts = [clear_prompt(model, length, ANSWER_TOKENS) for length in (1, 17, 200, 300)]
        answers = await ask_all(cluster.url, prompts, at_once=4, num_tokens=ANSWER_TOKENS)
        assert [each.tokens for each in answers] == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
        assert {each.report["decode"]["node"] for each in answers} == {"n0", "n1"}
        assert {node["role"] for node in cluster.idle_nodes(["n0", "n1"]).values()} == {"both"}
