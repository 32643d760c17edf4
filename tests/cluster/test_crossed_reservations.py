"""Nodes that hold room for prompts which the other one has no room to compute."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from node.config import NodeConfig
from router.config import RouterConfig
from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest
from router.server import RouterServer
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import ALWAYS_REMOTE, Process
from tests.support.cluster.nodes import status_of
from tests.support.engine.driving import sized
from tests.support.engine.oracle import clear_prompt, greedy
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT_TOKENS, ANSWER_TOKENS, NODE_BLOCKS, NODE_SLOTS = 320, 8, 36, 12
"""A node holds one such request, of 21 blocks, and no second one."""


class Crossed:
    """Each node computes prompts for the other one in turn; one alone does all."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        if len(candidates) < 2:
            return Plan(candidates[0].name, candidates[0].name) if candidates else None
        first, second = sorted(each.name for each in candidates)
        return Plan(first, second) if request.number % 2 else Plan(second, first)


@asynccontextmanager
async def crossed_nodes(model: Path, folder: Path) -> AsyncIterator[tuple[RouterServer, list[Process]]]:
    config = RouterConfig(model, port=0, control_port=0, roles="elastic", request_timeout_s=PATIENCE_S)
    router = RouterServer(config, policy=Crossed())
    await router.start()
    engine = sized(model, NODE_BLOCKS, NODE_SLOTS)
    with ExitStack() as stack:
        nodes = []
        for name in ("n0", "n1"):
            node = NodeConfig(
                name=name,
                model_path=str(model),
                router_addresses=(router.control_address,),
                admission_timeout_s=0.5,
                local_prefill=ALWAYS_REMOTE,
                engine=engine,
            )
            nodes.append(await asyncio.to_thread(Process.start, name, node, folder))
            stack.callback(nodes[-1].stop)
        async with asyncio.timeout(PATIENCE_S):
            while len(router.nodes.live()) < len(nodes):
                await asyncio.sleep(0.02)
        yield router, nodes
        await router.stop()


async def test_two_nodes_that_wait_for_each_other_s_room_go_on(tiny_checkpoint, tmp_path: Path) -> None:
    model = tiny_checkpoint("granite")
    async with crossed_nodes(model, tmp_path) as (router, nodes):
        prompts = [clear_prompt(model, PROMPT_TOKENS, ANSWER_TOKENS, seed) for seed in range(8)]
        answers = await ask_all(router.url, prompts, at_once=8, num_tokens=ANSWER_TOKENS)
        assert [each.tokens for each in answers] == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
        assert "local" in {each.report["path"] for each in answers}, "none were in each other's way"
        async with asyncio.timeout(PATIENCE_S):
            for node in nodes:
                while (status := await status_of(node.ready["address"])).blocks.in_use or status.slots.in_use:
                    await asyncio.sleep(0.02)
