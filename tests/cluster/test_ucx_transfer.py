"""Transfers between real processes over UCX, and what happens when one of them dies or stops."""

import asyncio
import os
import signal
import time

import pytest

from tests.support.cluster.netns import NamespacesUnavailable, two_namespaces
from tests.support.transfer.transfer_child import STAGING
from tests.support.transfer.transfer_peer import Peer, two
from transfer.protocol.plan import TransferPlan
from transfer.transfer import GRACE_S

pytestmark = pytest.mark.slow  # bounds times that other work on the machine would stretch

MIB = 1 << 20
SOON_S = 20.0
"""Far less than the 60 s that most sessions have: what a session's deadline alone would end takes longer."""
DEADLINE_S = 6.0
"""Of sessions that are to reach it, after some messages have landed."""


def plan(nonce: int, mib: int = 64, message_mib: int = 8) -> TransferPlan:
    """`mib` of attention in blocks of 1 MiB and 16 tokens, and a state of 8 MiB."""
    return TransferPlan(
        nonce=nonce,
        num_tokens=16 * mib,
        first_block=0,
        block_size=16,
        block_bytes=MIB,
        state_bytes=8 * MIB,
        max_message_bytes=message_mib * MIB,
    )


def tiny_plan(nonce: int) -> TransferPlan:
    return TransferPlan(
        nonce=nonce,
        num_tokens=50,
        first_block=1,
        block_size=16,
        block_bytes=4096,
        state_bytes=30_000,
        max_message_bytes=8192,
    )


@pytest.fixture
async def pair():
    async with two(Peer.start(), Peer.start()) as both:
        yield both


@pytest.fixture
def two_hosts():
    try:
        with two_namespaces() as namespaces:
            yield namespaces
    except NamespacesUnavailable as why:
        pytest.skip(str(why))


async def staging_is_whole(peer: Peer) -> dict:
    """The first report in which nothing is held any more."""
    async with asyncio.timeout(SOON_S):
        while True:
            report = await peer.report()
            if report["free"] == STAGING.num_buffers and report["operations"] == 0:
                return report
            await asyncio.sleep(0.02)


async def test_64_mib_and_a_state_arrive_byte_for_byte(pair):
    prefill, decode = pair
    landed = await decode.expect(plan(1))
    sent = prefill.send(plan(1), decode)
    received, stats = await landed, await sent
    assert received["wrong"] == 0
    assert (received["first_token"], received["messages"]) == (42, 9)
    assert (received["attention_bytes"], received["state_bytes"]) == (64 * MIB, 8 * MIB)
    assert stats["messages"] == 9
    for peer in pair:
        await staging_is_whole(peer)


async def test_a_killed_sender_fails_the_receiver_at_once_and_its_staging_comes_back(pair):
    prefill, decode = pair
    landed = await decode.expect(plan(1, mib=1024), within_s=60)
    prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    prefill.process.kill()
    killed_s = time.monotonic()
    assert (await landed)["failed"] == "peer_lost"
    assert time.monotonic() - killed_s < SOON_S
    report = await staging_is_whole(decode)
    assert report["connections_lost"] == 1
    assert report["failures"] == {"peer_lost": 1}


async def test_a_sender_killed_while_it_computes_fails_the_receiver_at_once(pair):
    prefill, decode = pair
    landed = await decode.expect(plan(1), within_s=60)
    prefill.send(plan(1), decode, within_s=60, tokens=16 * 32)
    await decode.heard("landed", 3)
    prefill.process.kill()
    killed_s = time.monotonic()
    assert (await landed)["failed"] == "peer_lost"
    assert time.monotonic() - killed_s < SOON_S
    await staging_is_whole(decode)


async def test_a_killed_receiver_fails_the_sender(pair):
    prefill, decode = pair
    await decode.expect(plan(1, mib=1024), within_s=60)
    sent = prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    decode.process.kill()
    killed_s = time.monotonic()
    assert (await sent)["failed"] == "peer_lost"
    assert time.monotonic() - killed_s < SOON_S
    await staging_is_whole(prefill)


async def test_a_stopped_sender_fails_the_receiver_at_its_deadline_and_its_late_bytes_are_dropped(pair):
    """UCX notices nothing of a stopped peer: only our deadline does."""
    prefill, decode = pair
    landed = await decode.expect(plan(1, mib=1024), within_s=DEADLINE_S)
    sent = prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    os.kill(prefill.process.pid, signal.SIGSTOP)
    assert (await landed)["failed"] == "deadline"
    await staging_is_whole(decode)
    os.kill(prefill.process.pid, signal.SIGCONT)
    assert (await sent)["failed"] == "peer_lost"
    # The nodes go on with a new session over a new connection.
    landed = await decode.expect(plan(2))
    prefill.send(plan(2), decode)
    assert (await landed)["wrong"] == 0
    await staging_is_whole(decode)
    await staging_is_whole(prefill)


async def test_a_stopped_receiver_fails_the_sender_at_its_deadline(pair):
    prefill, decode = pair
    await decode.expect(plan(1, mib=1024), within_s=60)
    sent = prefill.send(plan(1, mib=1024), decode, within_s=DEADLINE_S)
    await decode.heard("landed", 3)
    os.kill(decode.process.pid, signal.SIGSTOP)
    assert (await sent)["failed"] == "deadline"
    report = await staging_is_whole(prefill)
    assert report["forced_closes"] == 1


async def warmed_up(prefill: Peer, decode: Peer) -> None:
    """They have a connection, and no other session than this one."""
    landed = await decode.expect(tiny_plan(1))
    prefill.send(tiny_plan(1), decode)
    await landed


def one_message(nonce: int) -> TransferPlan:
    return plan(nonce, mib=4, message_mib=16)


async def all_staging_is_taken(peer: Peer) -> None:
    async with asyncio.timeout(SOON_S):
        while (await peer.report())["free"]:
            await asyncio.sleep(0.02)


async def lands_soon(prefill: Peer, decode: Peer) -> None:
    """Though one of them had no free staging buffer a moment ago."""
    async with asyncio.timeout(SOON_S):
        landed = await decode.expect(one_message(9), within_s=60)
        prefill.send(one_message(9), decode, within_s=60)
        assert (await landed)["wrong"] == 0


HOLDERS = list(range(2, 2 + STAGING.num_buffers))
"""Sessions of one message each that take all staging of a peer."""


async def test_cancelled_sessions_with_a_stopped_receiver_keep_no_staging_from_a_healthy_one(pair):
    prefill, stopped = pair
    await warmed_up(prefill, stopped)
    for nonce in HOLDERS:
        await stopped.expect(one_message(nonce), within_s=60)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    ends = [prefill.send(one_message(nonce), stopped, within_s=60) for nonce in HOLDERS]
    await all_staging_is_taken(prefill)
    async with Peer.start() as healthy:
        await prefill.call("cancel", nonces=HOLDERS)
        await lands_soon(prefill, healthy)
    assert {end["failed"] for end in await asyncio.gather(*ends)} == {"cancelled"}
    assert (await staging_is_whole(prefill))["forced_closes"] == 1


async def test_cancelled_sessions_with_a_stopped_sender_keep_no_staging_from_a_healthy_one(pair):
    stopped, decode = pair
    await warmed_up(stopped, decode)
    ends = [await decode.expect(one_message(nonce), within_s=60) for nonce in HOLDERS]
    os.kill(decode.process.pid, signal.SIGSTOP)  # so that all is announced and nothing taken when the sender stops
    for nonce in HOLDERS:
        stopped.send(one_message(nonce), decode, within_s=60)
    await all_staging_is_taken(stopped)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    os.kill(decode.process.pid, signal.SIGCONT)
    await all_staging_is_taken(decode)
    async with Peer.start() as healthy:
        await decode.call("cancel", nonces=HOLDERS)
        await lands_soon(healthy, decode)
    assert {end["failed"] for end in await asyncio.gather(*ends)} == {"cancelled"}
    assert (await staging_is_whole(decode))["forced_closes"] == 1


async def test_a_cancelled_session_of_healthy_peers_costs_them_no_connection(pair):
    """Its late messages are dropped at once; a renewed one goes on meanwhile, and long after the grace has passed."""
    prefill, decode = pair
    cancelled = await decode.expect(plan(1, mib=1024), within_s=60)
    stale = prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    await decode.call("cancel", nonces=[1])
    assert (await cancelled)["failed"] == "cancelled"
    renewed = await decode.expect(plan(2), within_s=60)
    computing = prefill.send(plan(2), decode, within_s=60, tokens=16 * 32)
    await stale
    await decode.heard("landed", 3)
    await asyncio.sleep(GRACE_S + 0.5)  # nothing happens: that is what is to be seen
    await prefill.call("go_on", nonce=2, tokens=plan(2).num_tokens)
    assert (await renewed)["wrong"] == 0
    await computing
    for peer in pair:
        report = await staging_is_whole(peer)
        assert (report["connections_lost"], report["forced_closes"]) == (0, 0)


async def test_late_messages_of_a_cancelled_session_are_dropped_and_a_neighbour_is_untouched(pair):
    prefill, decode = pair
    cancelled = await decode.expect(plan(1))
    sent = prefill.send(plan(1), decode, tokens=16 * 32)
    await decode.heard("landed", 3)
    await decode.call("cancel", nonces=[1])
    assert (await cancelled)["failed"] == "cancelled"
    neighbour = await decode.expect(plan(2))
    stale = prefill.send(plan(1), decode)  # the whole of it, as a sender that has not heard yet
    whole = prefill.send(plan(2), decode)
    assert (await neighbour)["wrong"] == 0
    assert (await stale)["messages"] == (await whole)["messages"] == 9
    report = await staging_is_whole(decode)
    assert report["dropped_parts"] == 18
    assert not sent.done()


async def test_300_sessions_in_a_row_leave_nothing_behind(pair):
    prefill, decode = pair

    async def one(nonce):
        landed = await decode.expect(tiny_plan(nonce))
        prefill.send(tiny_plan(nonce), decode)
        assert (await landed)["wrong"] == 0

    for nonce in range(1, 51):
        await one(nonce)
    before = [await staging_is_whole(peer) for peer in pair]
    for nonce in range(51, 351):
        await one(nonce)
    after = [await staging_is_whole(peer) for peer in pair]
    for early, late in zip(before, after, strict=True):
        assert late["open_files"] == early["open_files"]
        assert late["max_rss_kib"] - early["max_rss_kib"] < 4096
        assert late["sent"]["sessions"] + late["received"]["sessions"] == 350
        assert (late["connections_lost"], late["dropped_parts"]) == (0, 0)
    assert after[0]["connections_opened"] == 1


async def test_waiting_costs_no_cpu(pair):
    prefill, decode = pair
    await decode.expect(plan(1), within_s=60)
    prefill.send(plan(1), decode, within_s=60, tokens=16 * 8)
    await decode.heard("landed", 0)
    before = [await peer.report() for peer in pair]
    await asyncio.sleep(3)  # what is measured is what this costs
    after = [await peer.report() for peer in pair]
    for early, late in zip(before, after, strict=True):
        assert late["cpu_s"] - early["cpu_s"] < 0.03


async def test_nobody_at_the_address_fails_the_sender_with_its_name(pair):
    prefill, decode = pair
    decode.address = "127.0.0.1:1"
    failed = await prefill.send(plan(1), decode, within_s=10)
    assert failed["failed"] == "peer_lost"
    assert "127.0.0.1:1" in failed["reason"]


async def test_two_hosts_hand_over_by_tcp(two_hosts):
    left, right = two_hosts
    async with two(
        Peer.start(*left.enter, host=left.address, net_devices=left.device),
        Peer.start(*right.enter, host=right.address, net_devices=right.device),
    ) as (prefill, decode):
        assert decode.address.startswith(right.address)
        landed = await decode.expect(plan(1))
        sent = prefill.send(plan(1), decode)
        assert (await landed)["wrong"] == 0
        assert (await sent)["messages"] == 9
        described = (await prefill.report())["describe"]
        assert described[f"to {decode.address}"] == f"tcp/{left.device}"
        landed = await decode.expect(plan(2, mib=1024), within_s=60)
        prefill.send(plan(2, mib=1024), decode, within_s=60)
        await decode.heard("landed", 15)
        prefill.process.kill()
        killed_s = time.monotonic()
        assert (await landed)["failed"] == "peer_lost"
        assert time.monotonic() - killed_s < SOON_S
        await staging_is_whole(decode)
