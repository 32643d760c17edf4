"""An answer that nobody reads pauses on its decode node, and nobody else's does."""

import asyncio
from dataclasses import replace

from headrace.wire.messages import DecodeDone, LocalPrefill, Start, Tokens
from headrace.wire.node_messages import NodeStatus
from node.config import NodeConfig
from tests.support.cluster.cluster import with_engine
from tests.support.cluster.nodes import decode_alone, node_client, status_of
from tests.support.cluster.process import Process
from tests.support.engine.driving import GREEDY, request
from tests.support.patience import PATIENCE_S

LONG = replace(GREEDY, max_tokens=600)
TOLD = replace(LONG, logprobs=20)  # about 300 bytes a token
WINDOW_TOKENS = 200
"""gRPC takes no more of them before it blocks: 16 KiB at the caller's end, by 300 bytes, and what it rounds up."""


async def test_it_pauses_after_a_bounded_number_of_tokens_and_ends_when_it_is_read(tiny_checkpoint, tmp_path) -> None:
    config = NodeConfig("d0", str(tiny_checkpoint("granite")), engine=with_engine(), max_unsent_tokens=64)
    node = Process.start("d0", config, tmp_path)
    address = node.ready["address"]

    async def until_paused() -> NodeStatus:
        while not (status := await status_of(address)).counters["pauses"]:
            await asyncio.sleep(0.01)
        return status

    try:
        async with node_client("d0", address) as client, asyncio.timeout(PATIENCE_S):
            start = Start(request([7] * 20, TOLD), may_prefill_remotely=False)
            async with client.decode(start, timeout_s=PATIENCE_S) as unread:
                status = await until_paused()
                taken = status.counters["sampled_tokens"]
                assert taken <= 64 + WINDOW_TOKENS
                other = await decode_alone(client, request([8] * 20, LONG))
                assert len(other) == LONG.max_tokens
                status = await status_of(address)
                assert status.counters["sampled_tokens"] <= taken + LONG.max_tokens + 1, "it stood still all the while"
                assert status.running == 1
                num_tokens = 0
                async for event in unread:
                    if isinstance(event, Tokens):
                        num_tokens += len(event.tokens)
                    if isinstance(event, DecodeDone):
                        break
                    assert isinstance(event, Tokens | LocalPrefill)
                assert num_tokens == TOLD.max_tokens
            print(f"{taken:.0f} tokens before the pause")
    finally:
        node.stop()


async def test_a_paused_answer_gives_everything_back_when_its_caller_leaves(tiny_checkpoint, tmp_path) -> None:
    config = NodeConfig("d0", str(tiny_checkpoint("granite")), engine=with_engine(), max_unsent_tokens=64)
    node = Process.start("d0", config, tmp_path)
    try:
        async with node_client("d0", node.ready["address"]) as client, asyncio.timeout(PATIENCE_S):
            start = Start(request([7] * 20, TOLD), may_prefill_remotely=False)
            async with client.decode(start, timeout_s=PATIENCE_S):
                while not (await status_of(node.ready["address"])).counters["pauses"]:
                    await asyncio.sleep(0.01)
            while (status := await status_of(node.ready["address"])).running or status.blocks.in_use:
                await asyncio.sleep(0.01)
    finally:
        node.stop()
