"""A session's plan, and the lease on its blocks while copies run: real engines in one process."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.engine import Engine
from headrace.wire.messages import PrefillRequest, Reservation
from node_runtime.packing import Locate, Packing
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import plan_of
from tests.support.engine.driving import request
from tests.support.engine.oracle import random_prompt
from tests.support.loop_clock import leap
from tests.support.node.linked_roles import TIMEOUT_S, Linked, linked
from transfer.buffers import StagingBuffer
from transfer.protocol.authentication import new_secret
from transfer.protocol.envelope import new_nonce
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage

PROMPT = request(random_prompt(140))
KNOWN = 128
SESSION_S = 60.0
LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))


def reservation_of(num_tokens: int, hit: int) -> Reservation:
    return Reservation(7, hit, num_tokens, "host:1", LAYOUT, 5.0, bytes(32))


def test_a_plan_covers_the_blocks_beyond_the_attention_hit_and_the_state() -> None:
    messages = plan_of(reservation_of(100, 32), 3 * LAYOUT.block_bytes).messages
    assert [(m.first_block, m.num_blocks) for m in messages] == [(2, 3), (5, 2)], "the state fits behind the last"
    assert messages[-1].state_bytes == LAYOUT.state_bytes


def test_a_full_attention_hit_leaves_a_transfer_of_the_state_alone() -> None:
    plan = plan_of(reservation_of(64, 64), 3 * LAYOUT.block_bytes)
    assert [(m.num_blocks, m.state_bytes) for m in plan.messages] == [(0, LAYOUT.state_bytes)]


class SlowPacking:
    """A gather that is under way until it is let go, as one behind a device's other work is."""

    def __init__(self, inner: Packing) -> None:
        self.gathering, self.let_go = asyncio.Event(), asyncio.Event()
        self._inner = inner

    async def gather(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        self.gathering.set()
        await self.let_go.wait()
        await self._inner.gather(message, buffer, locate)

    async def wait_event(self, device_event: Any) -> None:
        await self._inner.wait_event(device_event)


def slowed(runtime: NodeRuntime) -> SlowPacking:
    packing = vars(runtime)["packing"] = SlowPacking(runtime.packing)
    return packing


def blocks_in_use(engine: Engine) -> int:
    engine.admit()  # ends the leases that are over
    return engine.cache.stats().blocks.in_use


async def prefilled(nodes: Linked) -> None:
    layout, address = nodes.decode_runtime.layout, nodes.decode_runtime.transport.address
    reservation = Reservation(new_nonce(), 0, len(PROMPT.tokens), address, layout, SESSION_S, new_secret())
    async for _ in nodes.prefill.run(PrefillRequest(PROMPT, reservation), TIMEOUT_S):
        pass


async def exported(nodes: Linked) -> None:
    fetch = nodes.fetch_source.requests[0]
    again = replace(fetch.reservation, nonce=new_nonce(), timeout_s=SESSION_S)
    await nodes.fetch_source.fetch_server.run(replace(fetch, reservation=again), TIMEOUT_S)


@pytest.mark.parametrize("role", [prefilled, exported])
async def test_blocks_stay_leased_while_a_late_gather_reads_them(
    role: Callable[[Linked], Any], tiny_checkpoint: Callable[[str], Path]
) -> None:
    """Even where requests are given no time at all when a node stops: that has nothing to do with it."""
    at_once = {"shutdown_grace_s": 0.0}
    async with linked(tiny_checkpoint("qwen35"), prefill=at_once, decode=at_once) as nodes:
        await nodes.generate(PROMPT)
        await nodes.first_token(PROMPT, KNOWN)
        runtime = nodes.prefill_runtime if role is prefilled else nodes.decode_runtime
        packing = slowed(runtime)
        async with asyncio.timeout(TIMEOUT_S):
            moving = asyncio.create_task(role(nodes))
            await packing.gathering.wait()
            leap(SESSION_S)
            while runtime.transport.stats.failures.get("deadline") != 1:
                await asyncio.sleep(0.01)
            assert await runtime.loop.call(partial(blocks_in_use, runtime.engine)) > 0
            packing.let_go.set()
            with pytest.raises(TransferFailed, match="deadline"):
                await moving
            await nodes.settled()
