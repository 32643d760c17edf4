"""Both ends of a transfer over the in-process transport: how it goes, and how it ends early."""

import asyncio

import numpy as np
import pytest

from tests.support.loop_clock import leap, soon, turns
from tests.support.transfer.faulty import Hold, flip_bit
from tests.support.transfer.transfer_pair import Pair, failure
from tests.support.transfer.transfer_plans import contents, secret_of, small_plan
from transfer.buffers import HostMemory, StagingBuffer
from transfer.protocol.digest import page_hashes
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import IllegalTransition, LayoutMismatch
from transfer.protocol.plan import PlannedMessage
from transfer.transfer import GRACE_S

NONCE = 7


# ---------------------------------------------------------------- what should happen


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
async def test_blocks_land_while_later_tokens_are_computed_and_the_state_comes_last(num_buffers):
    pair, plan = Pair(num_buffers=num_buffers), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan), pair.open(plan)
    outgoing.tokens_computed(16)
    await turns()
    assert [message.index for message, _ in pair.landed] == [0]
    outgoing.tokens_computed(18)
    await turns()
    assert [message.index for message, _ in pair.landed] == [0, 1]
    outgoing.finish(42)
    landed, sent = await incoming.landed(), await outgoing.done()
    pair.assert_landed_whole(plan)
    assert landed.first_token == 42
    for stats in (landed.stats, sent):
        assert (stats.attention_tokens, stats.attention_bytes, stats.state_bytes, stats.messages) == (
            10, 300, 300, 3,
        )  # fmt: skip
    await pair.assert_staging_returns()


async def test_a_receiver_with_every_block_gets_one_state_only_hand_over():
    pair, plan = Pair(), small_plan(NONCE, num_tokens=16, first_block=4)
    incoming, outgoing = pair.expect(plan), pair.send_all(plan)
    assert (await incoming.landed()).stats.attention_bytes == 0
    assert (await outgoing.done()).messages == 1
    pair.assert_landed_whole(plan)


async def test_many_sessions_share_one_staging_pool():
    pair = Pair(num_buffers=2)
    plans = [small_plan(nonce) for nonce in range(1, 21)]
    incoming = [pair.expect(plan) for plan in plans]
    outgoing = [pair.send_all(plan) for plan in plans]
    await asyncio.gather(*(end.landed() for end in incoming), *(end.done() for end in outgoing))
    assert len(pair.landed) == 60
    assert pair.decode.stats.received.sessions == 20
    await pair.assert_staging_returns()


async def test_a_slow_landing_keeps_order_and_holds_at_most_two_buffers():
    pair, plan = Pair(num_buffers=5), small_plan(NONCE, max_message_bytes=100)
    running, most = 0, 0

    async def land(message: PlannedMessage, buffer: StagingBuffer) -> None:
        nonlocal running, most
        running += 1
        await turns(20)
        most = max(most, 5 - pair.receiver_staging.num_free)
        assert running == 1
        np.testing.assert_array_equal(buffer.payload, contents(message, NONCE))
        running -= 1

    incoming = pair.receiver.expect(plan, secret=secret_of(NONCE), land=land, deadline_s=soon())
    pair.send_all(plan)
    await incoming.landed()
    assert most == 2


class SlowMemory(HostMemory):
    """Its page hashes are known when they are let go, as a device's are when it has come to them."""

    def __init__(self):
        self.let_go = asyncio.Event()

    async def page_hashes(self, buffer):
        await self.let_go.wait()
        return page_hashes(buffer.payload)


class SlowFinish(HostMemory):
    """What is enqueued on it is done when it is let go."""

    def __init__(self):
        self.let_go = asyncio.Event()

    async def finished(self):
        await self.let_go.wait()


@pytest.mark.parametrize("damaged", [False, True])
async def test_the_next_message_is_received_while_the_last_one_is_verified_and_lands_behind_it(damaged):
    plan, memory = small_plan(NONCE), SlowMemory()
    pair = Pair(flip_bit(Tag(NONCE, 0, True))) if damaged else Pair()
    pair.receiver_staging.memory = memory
    incoming, outgoing = pair.expect(plan), pair.send_all(plan)
    await turns()
    # Two messages lie in staging, as many as a session may have there; the third waits with its sender.
    assert pair.decode.stats.received_parts == 6 and pair.receiver_staging.num_free == 0
    assert pair.sender_staging.num_free == 1 and pair.landed == []
    memory.let_go.set()
    if damaged:
        assert (await failure(incoming)).cause == "wrong_digest"
        assert pair.landed == []  # though the second is as it was sent
    else:
        await incoming.landed()
        pair.assert_landed_whole(plan)
    await outgoing.done()
    await pair.assert_staging_returns()


# ---------------------------------------------------------------- ends that come early


async def test_late_messages_of_a_cancelled_session_touch_nothing_that_was_given_away():
    """Scenario 13: the same blocks and staging serve another session; the first one's bytes then arrive."""
    hold = Hold(Tag(NONCE, 1, True))
    pair, plan, other = Pair(hold, num_buffers=1, sender_buffers=4), small_plan(NONCE), small_plan(NONCE + 1)
    incoming, outgoing = pair.expect(plan), pair.send_all(plan)
    await asyncio.wait_for(hold.holding.wait(), 5)
    incoming.cancel()
    assert (await failure(incoming)).cause == "cancelled"
    pair.landed.clear()

    async def land_late(message: PlannedMessage, buffer: StagingBuffer) -> None:
        hold.release()  # the stale bytes arrive while the reused buffer holds the new session's
        await turns()
        await pair.land(message, buffer)

    second = pair.receiver.expect(other, secret=secret_of(NONCE + 1), land=land_late, deadline_s=soon())
    pair.send_all(other)
    await second.landed()
    await outgoing.done()
    pair.assert_landed_whole(other)
    await pair.assert_staging_returns()


async def test_a_stale_or_unknown_nonce_is_dropped_and_counted():
    pair, plan = Pair(), small_plan(NONCE)
    await pair.send_all(plan).done()
    assert pair.decode.stats.dropped_parts == 6
    assert pair.landed == []
    await pair.assert_staging_returns()


@pytest.mark.parametrize("changes", [{"block_bytes": 99}, {"num_tokens": 17}, {"block_size": 5}, {"state_bytes": 299}])
async def test_two_sides_that_plan_differently_never_land_a_wrong_message(changes):
    """Scenario 16, should the control plane ever let it through."""
    pair = Pair()
    theirs = small_plan(NONCE, **changes)
    incoming = pair.expect(small_plan(NONCE))
    pair.send_all(theirs)
    failed = await failure(incoming)
    assert failed.cause in {"wrong_message", "wrong_digest"}
    assert pair.landed == []


async def test_a_cancel_waits_for_the_landing_under_way():
    pair, plan = Pair(), small_plan(NONCE)
    landing, go_on = asyncio.Event(), asyncio.Event()

    async def land(message: PlannedMessage, buffer: StagingBuffer) -> None:
        landing.set()
        await go_on.wait()
        pair.landed.append((message, buffer.payload.copy()))

    incoming = pair.receiver.expect(plan, secret=secret_of(NONCE), land=land, deadline_s=soon())
    pair.send_all(plan)
    await asyncio.wait_for(landing.wait(), 5)
    incoming.cancel()
    told = asyncio.create_task(failure(incoming))
    await turns()
    assert not told.done()
    go_on.set()
    assert (await told).cause == "cancelled"
    await turns()
    assert [message.index for message, _ in pair.landed] == [0]
    await pair.assert_staging_returns()


async def test_a_cancelled_sender_packs_nothing_more():
    pair, plan = Pair(), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan), pair.open(plan)
    outgoing.tokens_computed(16)
    await turns()
    outgoing.cancel()
    outgoing.tokens_computed(18)  # prefill does not know yet
    outgoing.finish()
    assert (await failure(outgoing)).cause == "cancelled"
    leap()
    assert (await failure(incoming)).cause == "deadline"
    assert [message.index for message, _ in pair.landed] == [0]
    await pair.assert_staging_returns()


async def test_the_receivers_clock_does_not_run_while_its_prompt_stands_in_the_senders_line():
    pair, plan = Pair(), small_plan(NONCE)
    incoming = pair.expect(plan, deadline_s=soon(60), timeout_s=5)
    leap(30)
    await turns()
    pair.send_all(plan, deadline_s=soon(20))
    await asyncio.wait_for(incoming.landed(), 1)
    pair.assert_landed_whole(plan)


async def test_a_transfer_that_moves_may_take_longer_than_the_time_without_progress():
    pair, plan = Pair(), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan, soon(60), timeout_s=5), pair.open(plan, soon(60), timeout_s=5)
    for num_tokens in (4, 8, 12, 16, 18):
        outgoing.tokens_computed(num_tokens)
        await turns()
        leap(3)
        await turns()
    outgoing.finish()
    await asyncio.wait_for(incoming.landed(), 1)


async def test_a_sender_that_stops_in_the_middle_fails_both_ends_after_the_time_without_progress():
    pair, plan = Pair(), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan, soon(60), timeout_s=5), pair.open(plan, soon(60), timeout_s=5)
    outgoing.tokens_computed(16)
    await turns()
    leap(5)
    assert (await failure(incoming)).cause == "deadline"
    assert (await failure(outgoing)).cause == "deadline"
    await pair.assert_staging_returns()


async def test_losing_the_sender_fails_the_receiver_at_once():
    pair, plan = Pair(), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan, deadline_s=soon(60)), pair.open(plan)
    outgoing.tokens_computed(16)
    await turns()
    await pair.prefill.close()
    assert (await asyncio.wait_for(failure(incoming), 1)).cause == "peer_lost"
    assert (await asyncio.wait_for(failure(outgoing), 1)).cause == "peer_lost"
    await pair.assert_staging_returns()


async def test_losing_the_receiver_fails_the_sender_at_once():
    pair, plan = Pair(Hold(Tag(NONCE, 0, True))), small_plan(NONCE)
    pair.expect(plan, deadline_s=soon(60))
    outgoing = pair.open(plan, deadline_s=soon(60))
    outgoing.tokens_computed(16)
    await turns()
    await pair.decode.close()
    assert (await asyncio.wait_for(failure(outgoing), 1)).cause == "peer_lost"
    await pair.assert_staging_returns()


async def test_a_receiver_that_takes_nothing_fails_the_sender_at_its_deadline():
    hold = Hold(Tag(NONCE, 0, True))
    pair, plan = Pair(hold), small_plan(NONCE)
    pair.expect(plan, deadline_s=soon(60))
    outgoing = pair.open(plan)
    outgoing.tokens_computed(18)
    outgoing.finish()
    await turns()
    leap()
    assert (await failure(outgoing)).cause == "deadline"
    await pair.assert_staging_returns()
    assert pair.prefill.stats.connections_lost == 1


async def test_a_cancelled_sender_has_its_staging_back_though_its_receiver_takes_nothing():
    """At the end of the grace, not at the deadline; the connection is lost for it."""
    pair, plan = Pair(Hold(Tag(NONCE, 0, True))), small_plan(NONCE)
    pair.expect(plan, deadline_s=soon(60))
    outgoing = pair.open(plan, deadline_s=soon(60))
    outgoing.tokens_computed(18)
    await turns()
    assert pair.sender_staging.num_free == 0
    outgoing.cancel()
    assert (await failure(outgoing)).cause == "cancelled"
    assert pair.prefill.stats.connections_lost == 0
    leap(GRACE_S)
    await pair.assert_staging_returns()
    assert pair.prefill.stats.connections_lost == 1


async def test_a_cancelled_receiver_that_waits_for_staging_lets_its_sender_go_at_once():
    """Others may hold the staging for long: a sender whose part waited on would close the connection."""
    pair, plan = Pair(num_buffers=1), small_plan(NONCE)
    async with pair.receiver_staging.hold(1, soon()):
        incoming, outgoing = pair.expect(plan), pair.send_all(plan)
        await turns()
        assert pair.sender_staging.num_free == 0
        incoming.cancel()
        assert (await failure(incoming)).cause == "cancelled"
        await asyncio.wait_for(outgoing.done(), 1)
    assert pair.landed == []
    await pair.assert_staging_returns()


async def test_nobody_at_the_address_fails_the_sender():
    pair, plan = Pair(), small_plan(NONCE)

    async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
        raise AssertionError

    outgoing = pair.sender.open(plan, "d9", secret=secret_of(NONCE), pack=pack, deadline_s=soon())
    outgoing.tokens_computed(18)
    failed = await failure(outgoing)
    assert failed.cause == "peer_lost"
    assert "nobody is at 'd9'" in str(failed)


async def test_errors_of_pack_and_land_fail_their_session_and_are_kept_as_the_cause():
    pair, plan = Pair(), small_plan(NONCE)

    async def broken(message: PlannedMessage, buffer: StagingBuffer) -> None:
        raise ZeroDivisionError("kernel")

    incoming = pair.receiver.expect(plan, secret=secret_of(NONCE), land=broken, deadline_s=soon())
    pair.send_all(plan)
    failed = await failure(incoming)
    assert (failed.cause, type(failed.__cause__)) == ("local_error", ZeroDivisionError)
    outgoing = pair.sender.open(plan, "d0", secret=secret_of(NONCE), pack=broken, deadline_s=soon())
    outgoing.tokens_computed(16)
    assert (await failure(outgoing)).cause == "local_error"
    await pair.assert_staging_returns()


async def test_a_landing_that_fails_half_way_is_waited_for_like_any_other():
    """What it had enqueued on the device by then still writes the blocks, and reads the buffer."""
    pair, plan = Pair(), small_plan(NONCE)
    memory = pair.receiver_staging.memory = SlowFinish()

    async def broken(message: PlannedMessage, buffer: StagingBuffer) -> None:
        raise ZeroDivisionError("kernel")

    incoming = pair.receiver.expect(plan, secret=secret_of(NONCE), land=broken, deadline_s=soon())
    pair.send_all(plan)
    told = asyncio.create_task(failure(incoming))
    await turns()
    incoming.cancel()
    await turns()
    assert not told.done() and pair.receiver_staging.num_free < pair.num_buffers
    memory.let_go.set()
    assert (await told).cause == "cancelled"
    await pair.assert_staging_returns()


# ---------------------------------------------------------------- misuse


async def test_one_nonce_is_expected_once():
    pair, plan = Pair(), small_plan(NONCE)
    first = pair.expect(plan)
    with pytest.raises(IllegalTransition, match="issue a fresh one"):
        pair.expect(plan)
    pair.send_all(plan)
    await first.landed()


async def test_a_plan_that_fits_no_staging_buffer_is_refused_on_both_sides():
    pair, plan = Pair(), small_plan(NONCE, state_bytes=1001)
    with pytest.raises(LayoutMismatch, match="1001 bytes > staging buffer_bytes 1000"):
        pair.expect(plan)
    with pytest.raises(LayoutMismatch, match="1001 bytes > staging buffer_bytes 1000"):
        pair.open(plan)


async def test_a_first_token_of_more_than_32_bits_is_refused_before_anything_is_sent():
    pair, plan = Pair(), small_plan(NONCE)
    outgoing = pair.open(plan)
    outgoing.tokens_computed(18)
    with pytest.raises(LayoutMismatch, match="first_token 4294967296 is not in 0"):
        outgoing.finish(2**32)
    outgoing.cancel()
