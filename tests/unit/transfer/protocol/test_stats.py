"""Times of a completed session: by kind, and the part that a computing prompt hid."""

import asyncio

from tests.support.loop_clock import soon, turns
from tests.support.transfer.transfer_pair import Pair
from tests.support.transfer.transfer_plans import contents, secret_of, small_plan
from transfer.buffers import StagingBuffer
from transfer.protocol.plan import PlannedMessage
from transfer.protocol.stats import MovingTime
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def message(attention_bytes: int, state_bytes: int) -> PlannedMessage:
    return PlannedMessage(0, 0, 0, attention_bytes, state_bytes, 0)


BLOCKS, STATE, BOTH = message(30, 0), message(0, 10), message(10, 30)


def test_time_is_counted_once_however_many_messages_move():
    clock = Clock()
    moving = MovingTime(clock)
    clock.now_s += 5  # nothing moves
    moving.computing(True)
    moving.began(BLOCKS)
    clock.now_s += 1
    moving.began(BLOCKS)
    clock.now_s += 1
    moving.ended(BLOCKS)
    moving.computing(False)
    moving.began(STATE)
    clock.now_s += 4  # three of them the blocks'
    moving.ended(STATE)
    clock.now_s += 1
    moving.ended(BLOCKS)
    clock.now_s += 5
    moving.began(BOTH)
    clock.now_s += 8
    moving.ended(BOTH)
    assert (moving.attention_seconds, moving.state_seconds) == (2 + 3 + 1 + 2, 1 + 6)
    assert moving.hidden_seconds == 2.0


def open_timed(pair: Pair, clock: Clock) -> OutgoingTransfer:
    plan = small_plan()

    async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
        clock.now_s += 4 if message.state_bytes else 1
        buffer.payload[:] = contents(message, plan.nonce)

    return TransferSender(pair.prefill, pair.sender_staging, clock).open(
        plan, "d0", secret=secret_of(plan.nonce), pack=pack, deadline_s=soon()
    )


async def test_what_moves_while_the_prompt_computes_is_hidden():
    pair, clock = Pair(), Clock()
    incoming, outgoing = pair.expect(small_plan()), open_timed(pair, clock)
    num_attention = len(outgoing.plan.messages) - 1
    outgoing.tokens_computed(outgoing.plan.num_tokens)
    await turns()
    assert len(pair.landed) == num_attention == 2
    clock.now_s += 50  # the last tokens compute, nothing moves
    outgoing.finish()
    stats, landed = await outgoing.done(), await incoming.landed()
    assert (stats.attention_seconds, stats.state_seconds, stats.hidden_seconds) == (2.0, 4.0, 2.0)
    sent, received = pair.prefill.stats.sent, pair.decode.stats.received
    assert (sent.sessions, sent.attention_bytes, sent.state_bytes) == (1, stats.attention_bytes, stats.state_bytes)
    assert (sent.attention_seconds, sent.state_seconds, sent.hidden_seconds) == (2.0, 4.0, 2.0)
    assert (received.sessions, received.attention_bytes) == (1, stats.attention_bytes)
    assert landed.stats.attention_seconds > 0 and landed.stats.hidden_seconds == 0
    assert pair.prefill.stats.received.sessions == pair.decode.stats.sent.sessions == 0
    assert pair.prefill.stats.sent_to == {"d0": sent} and pair.decode.stats.sent_to == {}


async def test_a_failed_session_counts_by_its_cause_and_nowhere_else():
    pair = Pair()
    pair.expect(small_plan())
    outgoing = open_timed(pair, Clock())
    outgoing.cancel()
    await turns()
    assert pair.prefill.stats.failures == {"cancelled": 1}
    assert pair.prefill.stats.sent.sessions == pair.prefill.stats.sent.attention_bytes == 0
    assert pair.prefill.stats.sent_to == {}


async def test_waits_for_staging_are_counted_with_their_time():
    clock = Clock()
    staging = Staging(StagingConfig(num_buffers=1, buffer_bytes=10), clock=clock)
    other = Staging(StagingConfig(num_buffers=1, buffer_bytes=10), waits=staging.waits, clock=clock)
    async with staging.hold(10, soon()):
        async with other.hold(10, soon()):
            assert staging.waits.count == 0
            waiting = asyncio.ensure_future(other.take(10, soon()))
            await turns()
            assert (staging.waits.count, staging.waits.seconds) == (1, 0.0)
            clock.now_s += 0.25
        await waiting
    assert (staging.waits.count, other.waits.count) == (1, 1)
    assert staging.waits.seconds == 0.25
