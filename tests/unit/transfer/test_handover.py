"""Both ends of a hand-over over the in-process transport, and every fault a receiver must survive."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.transfer_plans import contents, small_plan
from transfer.buffers import Buffer
from transfer.envelope import ENVELOPE_BYTES, MAX_NOTE_BYTES, Tag
from transfer.errors import HandoverFailed, IllegalTransition, LayoutMismatch
from transfer.faulty import Fault, FaultyTransport, Hold, duplicate, flip_bit, lose, swap_with_next, truncate
from transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.plan import PlannedMessage, TransferPlan
from transfer.receiver import HandoverReceiver, IncomingHandover
from transfer.sender import HandoverSender, OutgoingHandover
from transfer.staging import Staging, StagingConfig

NONCE = 7


def soon(seconds: float = 5) -> float:
    return asyncio.get_running_loop().time() + seconds


async def turns(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@dataclass
class Pair:
    """A prefill and a decode node's ends, and what landed."""

    fault: Fault = field(default=lambda part, deliver: deliver(part))
    num_buffers: int = 2
    sender_buffers: int = 2

    def __post_init__(self) -> None:
        network = InProcessNetwork()
        self.prefill = InProcessTransport(network, "p0")
        self.decode = InProcessTransport(network, "d0")
        self.sender_staging = Staging(StagingConfig(self.sender_buffers, buffer_bytes=1000))
        self.receiver_staging = Staging(StagingConfig(self.num_buffers, buffer_bytes=1000))
        self.sender = HandoverSender(self.prefill, self.sender_staging)
        self.receiver = HandoverReceiver(FaultyTransport(self.decode, self.fault), self.receiver_staging)
        self.landed: list[tuple[PlannedMessage, Buffer]] = []

    def expect(self, plan: TransferPlan, deadline_s: float | None = None) -> IncomingHandover:
        return self.receiver.expect(plan, land=self.land, deadline_s=deadline_s or soon())

    def open(self, plan: TransferPlan, deadline_s: float | None = None) -> OutgoingHandover:
        async def pack(message: PlannedMessage, buffer: Buffer) -> None:
            buffer[:] = contents(message, plan.nonce)

        return self.sender.open(plan, "d0", pack=pack, deadline_s=deadline_s or soon())

    async def land(self, message: PlannedMessage, buffer: Buffer) -> None:
        self.landed.append((message, buffer.copy()))

    def send_all(self, plan: TransferPlan, note: bytes = b"") -> OutgoingHandover:
        outgoing = self.open(plan)
        outgoing.tokens_computed(plan.num_tokens)
        outgoing.finish(note)
        return outgoing

    async def assert_staging_returns(self) -> None:
        await turns()
        for staging, whole in (
            (self.sender_staging, self.sender_buffers),
            (self.receiver_staging, self.num_buffers),
        ):
            staging.check()
            assert staging.num_free == whole

    def assert_landed_whole(self, plan: TransferPlan) -> None:
        assert [message for message, _ in self.landed] == list(plan.messages)
        for message, data in self.landed:
            np.testing.assert_array_equal(data, contents(message, plan.nonce))


async def failure(handover: IncomingHandover | OutgoingHandover) -> HandoverFailed:
    with pytest.raises(HandoverFailed) as failed:
        await (handover.landed() if isinstance(handover, IncomingHandover) else handover.done())
    return failed.value


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
    outgoing.finish(b"token 42")
    landed, sent = await incoming.landed(), await outgoing.done()
    pair.assert_landed_whole(plan)
    assert landed.note == b"token 42"
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
    assert pair.decode.stats.sessions_completed == 20
    await pair.assert_staging_returns()


async def test_a_slow_landing_keeps_order_and_holds_at_most_two_buffers():
    pair, plan = Pair(num_buffers=5), small_plan(NONCE, max_message_bytes=100)
    running, most = 0, 0

    async def land(message: PlannedMessage, buffer: Buffer) -> None:
        nonlocal running, most
        running += 1
        await turns(20)
        most = max(most, 5 - pair.receiver_staging.num_free)
        assert running == 1
        np.testing.assert_array_equal(buffer, contents(message, NONCE))
        running -= 1

    incoming = pair.receiver.expect(plan, land=land, deadline_s=soon())
    pair.send_all(plan)
    await incoming.landed()
    assert most == 2


# ---------------------------------------------------------------- what a network can do


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("byte", [0, 99])
async def test_a_flipped_payload_bit_fails_the_session_and_nothing_lands_after_it(index, byte):
    pair, plan = Pair(flip_bit(Tag(NONCE, index, True), byte)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    assert (await failure(incoming)).cause == "wrong_digest"
    await turns()
    assert [message.index for message, _ in pair.landed] == list(range(index))
    assert pair.decode.stats.failures == {"wrong_digest": 1}
    await pair.assert_staging_returns()


@pytest.mark.parametrize("byte", range(ENVELOPE_BYTES))
async def test_a_flipped_envelope_bit_never_lands_a_message(byte):
    pair, plan = Pair(flip_bit(Tag(NONCE, 1, False), byte)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan, b"note")
    failed = await failure(incoming)
    assert failed.cause in {"malformed", "wrong_message", "wrong_digest"}
    assert [message.index for message, _ in pair.landed] == [0]
    await pair.assert_staging_returns()


async def test_a_flipped_bit_of_the_note_is_noticed():
    note_at = 48
    pair, plan = Pair(flip_bit(Tag(NONCE, 2, False), note_at)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan, b"token 42")
    assert (await failure(incoming)).cause == "wrong_digest"
    assert [message.index for message, _ in pair.landed] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "cause", "landed"),
    [
        # a repeated part comes behind those that wait already, which are as planned and may land
        (duplicate(Tag(NONCE, 0, False)), "wrong_order", [0, 1]),
        (duplicate(Tag(NONCE, 0, True)), "wrong_order", [0, 1]),
        (duplicate(Tag(NONCE, 1, True)), "wrong_order", [0, 1]),
        (swap_with_next(Tag(NONCE, 0, False)), "wrong_order", []),
        (swap_with_next(Tag(NONCE, 0, True)), "wrong_order", []),
        (swap_with_next(Tag(NONCE, 1, True)), "wrong_order", [0]),
        (truncate(Tag(NONCE, 0, False)), "malformed", []),
        (truncate(Tag(NONCE, 1, True)), "wrong_size", [0]),
        (lose(Tag(NONCE, 0, False)), "wrong_order", []),
        (lose(Tag(NONCE, 1, True)), "wrong_order", [0]),
    ],
)
async def test_a_message_repeated_swapped_cut_or_lost_fails_the_session(fault, cause, landed):
    pair, plan = Pair(fault), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    assert (await failure(incoming)).cause == cause
    await turns()
    indices = [message.index for message, _ in pair.landed]
    assert indices == landed[: len(indices)]  # a landing not yet begun when the session failed does not begin
    await pair.assert_staging_returns()


async def test_a_lost_last_message_fails_both_ways_at_the_deadline():
    pair, plan = Pair(lose(Tag(NONCE, 2, True))), small_plan(NONCE)
    incoming = pair.expect(plan, deadline_s=soon(0.1))
    pair.send_all(plan)
    failed = await failure(incoming)
    assert failed.cause == "deadline"
    assert "2 arrived and 2 landed of 3" in str(failed)
    await pair.assert_staging_returns()


async def test_a_duplicate_after_the_landing_is_dropped():
    pair, plan = Pair(duplicate(Tag(NONCE, 2, True))), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    try:
        await incoming.landed()
    except HandoverFailed as failed:  # it may also come between arrival and landing
        assert failed.cause == "wrong_order"
    await turns()
    assert len(pair.landed) <= 3
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

    async def land_late(message: PlannedMessage, buffer: Buffer) -> None:
        hold.release()  # the stale bytes arrive while the reused buffer holds the new session's
        await turns()
        await pair.land(message, buffer)

    second = pair.receiver.expect(other, land=land_late, deadline_s=soon())
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

    async def land(message: PlannedMessage, buffer: Buffer) -> None:
        landing.set()
        await go_on.wait()
        pair.landed.append((message, buffer.copy()))

    incoming = pair.receiver.expect(plan, land=land, deadline_s=soon())
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
    incoming, outgoing = pair.expect(plan, deadline_s=soon(0.1)), pair.open(plan)
    outgoing.tokens_computed(16)
    await turns()
    outgoing.cancel()
    outgoing.tokens_computed(18)  # prefill does not know yet
    outgoing.finish()
    assert (await failure(outgoing)).cause == "cancelled"
    assert (await failure(incoming)).cause == "deadline"
    assert [message.index for message, _ in pair.landed] == [0]
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
    outgoing = pair.open(plan, deadline_s=soon(0.1))
    outgoing.tokens_computed(18)
    outgoing.finish()
    assert (await failure(outgoing)).cause == "deadline"
    await pair.assert_staging_returns()
    assert pair.prefill.stats.connections_lost == 1


async def test_nobody_at_the_address_fails_the_sender():
    pair, plan = Pair(), small_plan(NONCE)

    async def pack(message: PlannedMessage, buffer: Buffer) -> None:
        raise AssertionError

    outgoing = pair.sender.open(plan, "d9", pack=pack, deadline_s=soon())
    outgoing.tokens_computed(18)
    failed = await failure(outgoing)
    assert failed.cause == "peer_lost"
    assert "nobody is at 'd9'" in str(failed)


async def test_errors_of_pack_and_land_fail_their_session_and_are_kept_as_the_cause():
    pair, plan = Pair(), small_plan(NONCE)

    async def broken(message: PlannedMessage, buffer: Buffer) -> None:
        raise ZeroDivisionError("kernel")

    incoming = pair.receiver.expect(plan, land=broken, deadline_s=soon())
    pair.send_all(plan)
    failed = await failure(incoming)
    assert (failed.cause, type(failed.__cause__)) == ("local_error", ZeroDivisionError)
    outgoing = pair.sender.open(plan, "d0", pack=broken, deadline_s=soon())
    outgoing.tokens_computed(16)
    assert (await failure(outgoing)).cause == "local_error"
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


async def test_a_note_too_long_is_refused_before_anything_is_sent():
    pair, plan = Pair(), small_plan(NONCE)
    outgoing = pair.open(plan)
    outgoing.tokens_computed(18)
    with pytest.raises(LayoutMismatch, match="note of 65 bytes"):
        outgoing.finish(b"x" * (MAX_NOTE_BYTES + 1))
    outgoing.cancel()
