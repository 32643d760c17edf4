"""What two hosts know of each other when the network between them falls silent: nothing says so, and no session's
deadline is near. The host between them forwards nothing more; both kernels still have their links up."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.cluster.netns import Cut, Namespace, NamespacesUnavailable, routed_namespaces
from tests.support.transfer.transfer_peer import Peer, two
from transfer.protocol.plan import TransferPlan

pytestmark = pytest.mark.slow  # bounds times that other work on the machine would stretch

FAR_S = 50.0
"""The sessions' deadline."""
SOON_S = 10.0
"""Less than anything but the keepalive takes to notice a cut: it does within two seconds, and a busy machine later."""
MIB = 1 << 20


def plan(nonce: int, mib: int) -> TransferPlan:
    """In blocks of 64 KiB and 16 tokens, and a state of 1 MiB."""
    return TransferPlan(
        nonce=nonce,
        num_tokens=256 * mib,
        first_block=0,
        block_size=16,
        block_bytes=MIB // 16,
        state_bytes=MIB,
        max_message_bytes=MIB,
    )


@dataclass
class Hosts:
    sender: Peer
    receiver: Peer
    cut: Cut

    async def open(self, planned: TransferPlan, tokens: int | None = None) -> asyncio.Future[Any]:
        """Both ends of a session; `tokens` of the prompt are computed, all if None."""
        received = await self.receiver.expect(planned, FAR_S)
        return asyncio.gather(received, self.sender.send(planned, self.receiver, FAR_S, tokens))


@pytest.fixture(scope="module")
def routed() -> Iterator[tuple[Namespace, Namespace, Cut]]:
    try:
        with routed_namespaces() as made:
            yield made
    except NamespacesUnavailable as why:
        pytest.skip(str(why))


@pytest.fixture
async def hosts(routed: tuple[Namespace, Namespace, Cut]) -> AsyncIterator[Hosts]:
    left, right, cut = routed
    async with two(
        Peer.start(*left.enter, host=left.address, net_devices=left.device),
        Peer.start(*right.enter, host=right.address, net_devices=right.device),
    ) as (sender, receiver):
        try:
            yield Hosts(sender, receiver, cut)
        finally:
            cut.mend()


async def failed_after_s(ends: asyncio.Future[Any], since_s: float) -> float:
    async with asyncio.timeout(FAR_S):
        for end in await ends:
            assert end["failed"] == "peer_lost"
    return time.monotonic() - since_s


@pytest.mark.parametrize("tokens", [256, None])
async def test_both_ends_know_long_before_their_deadline(hosts: Hosts, tokens: int | None) -> None:
    """While the prompt computes and nothing moves (its first message has landed), and while messages move."""
    ends = await hosts.open(plan(1, 512), tokens)
    await hosts.receiver.heard("landed", 0)
    hosts.cut.sever()
    assert await failed_after_s(ends, time.monotonic()) < SOON_S


async def test_a_session_that_begins_after_the_cut_fails_its_sender_soon(hosts: Hosts) -> None:
    """Whether the connection is not known to be lost yet, is lost, or was never made."""
    landed, _ = await (await hosts.open(plan(1, 1)))
    assert landed["wrong"] == 0
    hosts.cut.sever()
    for nonce in (2, 3):
        began_s = time.monotonic()
        sent = hosts.sender.send(plan(nonce, 1), hosts.receiver, FAR_S)
        assert (await sent)["failed"] == "peer_lost"
        assert time.monotonic() - began_s < SOON_S


async def test_a_cut_of_half_a_second_is_survived(hosts: Hosts) -> None:
    ends = await hosts.open(plan(1, 512))
    await hosts.receiver.heard("landed")
    hosts.cut.sever()
    await asyncio.sleep(0.5)  # what is tested is a cut of this length
    hosts.cut.mend()
    landed, sent = await ends
    assert landed["wrong"] == 0
    assert sent["messages"] == 513


@pytest.mark.parametrize("which", ["sender", "receiver"])
async def test_a_peer_that_has_no_time_is_not_lost(hosts: Hosts, which: str) -> None:
    """Its kernel answers for it: what a busy machine keeps from running for seconds goes on afterwards."""
    ends = await hosts.open(plan(1, 512))
    await hosts.receiver.heard("landed")
    stopped: Peer = getattr(hosts, which)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    await asyncio.sleep(4)  # what is tested is a stop of this length
    os.kill(stopped.process.pid, signal.SIGCONT)
    landed, sent = await ends
    assert landed["wrong"] == 0
    assert sent["messages"] == 513
