"""Whoever reaches a receiver and knows a session's nonce, and not its secret: nothing lands, nothing ends, all comes
back. The stranger here sends what a real sender would, over a connection of its own."""

import asyncio
import logging

import numpy as np
import pytest

from tests.support.loop_clock import leap, soon, turns
from tests.support.transfer.faulty import Deliver
from tests.support.transfer.inprocess import InProcessTransport
from tests.support.transfer.transfer_pair import Pair, failure
from tests.support.transfer.transfer_plans import contents, small_plan
from transfer.backend import Arrival
from transfer.buffers import Buffer, StagingBuffer
from transfer.protocol.envelope import ENVELOPE_BYTES, HEADER_BYTES, Tag
from transfer.protocol.errors import NoSecret
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig

NONCE = 7
FORGED_SECRET = bytes(range(32))


class Stranger:
    """Its messages have the planned sizes, under the session's tags, and bytes of its own."""

    def __init__(self, pair: Pair) -> None:
        self.transport = InProcessTransport(pair.network, "x0")
        self._sender = TransferSender(self.transport, Staging(StagingConfig(2, buffer_bytes=1000)))

    def send_all(self, plan: TransferPlan, secret: bytes = FORGED_SECRET) -> OutgoingTransfer:
        async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
            buffer.payload[:] = 0xAA

        outgoing = self._sender.open(plan, "d0", secret=secret, pack=pack, deadline_s=soon())
        outgoing.tokens_computed(plan.num_tokens)
        outgoing.finish(666)
        return outgoing

    async def send(self, tag: Tag, data: bytes) -> None:
        connection = await self.transport.connect("d0", soon())
        await connection.send(tag, np.frombuffer(data, np.uint8), soon())


@pytest.mark.parametrize("num_sent", [0, 16, 18])
async def test_the_right_nonce_with_a_wrong_secret_neither_lands_a_byte_nor_ends_the_session(num_sent):
    """Before anything has come, in the middle, and when only the state is missing."""
    pair, plan = Pair(), small_plan(NONCE)
    incoming, outgoing = pair.expect(plan), pair.open(plan)
    outgoing.tokens_computed(num_sent)
    await turns()
    landed = len(pair.landed)
    await Stranger(pair).send_all(plan).done()
    await turns()
    assert len(pair.landed) == landed
    assert pair.decode.stats.refusals == {"wrong_mac": 3, "no_envelope": 3}
    assert pair.decode.stats.failures == {}
    outgoing.tokens_computed(18)
    outgoing.finish(42)
    assert (await incoming.landed()).first_token == 42
    pair.assert_landed_whole(plan)
    await pair.assert_staging_returns()


async def test_a_session_that_only_a_stranger_answers_ends_at_its_deadline_and_gives_all_back():
    pair, plan = Pair(), small_plan(NONCE)
    incoming = pair.expect(plan)
    await Stranger(pair).send_all(plan).done()
    leap()
    assert (await failure(incoming)).cause == "deadline"
    assert pair.landed == []
    assert pair.decode.stats.failures == {"deadline": 1}
    await pair.assert_staging_returns()


async def test_what_was_read_of_another_session_is_refused_though_that_one_landed():
    """The reader has every byte of a session; it sends them again, under the tags of one that has just begun."""
    heard: list[tuple[Tag, bytes]] = []

    def overhear(part: Arrival, deliver: Deliver) -> None:
        heard.append((part.tag, part._part.tobytes()))  # type: ignore[attr-defined]
        deliver(part)

    pair, first, second = Pair(overhear), small_plan(NONCE), small_plan(NONCE + 1)
    incoming = pair.expect(first)
    pair.send_all(first)
    await incoming.landed()
    pair.landed.clear()
    later, replayed, stranger = pair.expect(second), tuple(heard), Stranger(pair)
    assert len(replayed) == 6
    for tag, data in replayed:
        await stranger.send(Tag(second.nonce, tag.index, tag.is_payload), data)
        await stranger.send(tag, data)  # and under its own, which has ended
    await turns()
    assert pair.landed == []
    assert pair.decode.stats.refusals == {"wrong_mac": 3, "no_envelope": 3}
    pair.send_all(second)
    await later.landed()
    pair.assert_landed_whole(second)
    await pair.assert_staging_returns()


async def test_a_payload_of_ones_own_behind_an_envelope_that_was_read_never_lands():
    """A reader that is quicker than the sender: the digest is the secret holder's, the bytes are not."""
    pair, plan = Pair(), small_plan(NONCE)
    stranger, incoming = Stranger(pair), pair.expect(plan)
    intercepted = asyncio.Event()
    connection = await pair.prefill.connect("d0", soon())
    send = connection.send

    def only_envelopes(tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        if tag.is_payload:
            intercepted.set()
            return asyncio.get_running_loop().create_future()
        return send(tag, part, deadline_s)

    connection.send = only_envelopes  # type: ignore[method-assign]
    outgoing = pair.open(plan)
    outgoing.tokens_computed(16)
    await asyncio.wait_for(intercepted.wait(), 5)
    await turns()
    altered = contents(plan.messages[0], NONCE)
    altered[0] ^= 1
    await stranger.send(Tag(NONCE, 0, True), altered.tobytes())
    assert (await failure(incoming)).cause == "wrong_digest"
    assert pair.landed == []
    outgoing.cancel()


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 128, b"x" * 100_000])
async def test_bytes_of_any_other_length_are_refused_before_they_are_received(data):
    pair, plan = Pair(), small_plan(NONCE)
    incoming, stranger = pair.expect(plan), Stranger(pair)
    for is_payload in (False, True):
        await stranger.send(Tag(NONCE, 0, is_payload), data)
    await turns()
    assert pair.decode.stats.refusals == {"no_mac": 1, "no_envelope": 1}
    pair.send_all(plan)
    await incoming.landed()
    pair.assert_landed_whole(plan)


async def test_a_sender_that_was_given_no_secret_sends_nothing_and_names_the_remedy():
    pair, plan = Pair(), small_plan(NONCE)
    with pytest.raises(NoSecret, match="run one release on all nodes"):
        pair.sender.open(plan, "d0", secret=b"", pack=never, deadline_s=soon())
    with pytest.raises(NoSecret):
        pair.receiver.expect(plan, secret=b"", land=never, deadline_s=soon())
    assert pair.prefill.stats.sent_parts == 0
    pair.expect(plan).cancel()  # the attempts that failed did not take the nonce


async def never(message: PlannedMessage, buffer: StagingBuffer) -> None:
    raise AssertionError("nothing may be packed or landed")


async def test_refusals_are_logged_once_a_session_without_the_secret(caplog):
    pair, plan = Pair(), small_plan(NONCE)
    secret = b"only the two nodes may know this"
    with caplog.at_level(logging.DEBUG):
        incoming = pair.receiver.expect(plan, secret=secret, land=pair.land, deadline_s=soon())
        stranger = Stranger(pair)
        await stranger.send(Tag(NONCE, 0, False), bytes(HEADER_BYTES))  # as an older release sends them
        await stranger.send_all(plan).done()
        await turns()
        pair.send_all(plan, secret=secret)
        await incoming.landed()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = f"no_mac: an envelope of {HEADER_BYTES} bytes, not {ENVELOPE_BYTES}: run one release on all nodes"
    assert said in warning.getMessage()
    assert "two nodes" not in caplog.text and secret.hex() not in caplog.text
