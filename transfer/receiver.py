"""The decode side of a hand-over: receives what one session's plan promises, verifies it, and lands it.

The whole of its use:

    handover = receiver.expect(plan, secret=new_secret(), land=scatter_blocks, deadline_s=loop.time() + 30)
    landed = await handover.landed()
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np

from transfer.backend import Arrival, Transport
from transfer.buffers import Buffer
from transfer.protocol.authentication import Verifier
from transfer.protocol.digest import PageHashes, message_digest, plan_digest
from transfer.protocol.envelope import ENVELOPE_BYTES, Envelope
from transfer.protocol.errors import MalformedEnvelope, Unauthenticated
from transfer.protocol.events import (
    Broken,
    Cause,
    EnvelopeArrived,
    Land,
    MessageLanded,
    PayloadAnnounced,
    PayloadArrived,
    PayloadChecked,
    PeerLost,
    ReceivePayload,
    ReceiverEvent,
)
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.protocol.session import ReceiverSession
from transfer.protocol.stats import TransferStats
from transfer.staging import Staging
from transfer.transfer import Transfer

log = logging.getLogger(__name__)

LandMessage: TypeAlias = Callable[[PlannedMessage, Buffer], Awaitable[None]]
"""Scatter the buffer, of exactly `message.num_bytes`, into the message's blocks or the slot: before it returns, or by
what it has enqueued on the staging memory's stream by then."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A session that landed whole. first_token: the one that the sender gave to `finish`, if any."""

    first_token: int | None
    stats: TransferStats


class TransferReceiver:
    """Expects hand-overs over one transport and one staging pool. A sender needs a pool of its own."""

    def __init__(self, transport: Transport, staging: Staging, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._staging = staging
        self._clock = clock

    def expect(self, plan: TransferPlan, *, secret: bytes, land: LandMessage, deadline_s: float) -> "IncomingTransfer":
        """Take the messages of this plan's nonce from now on; call before the sender learns of it.

        secret       that the sender must prove: a `new_secret()` for each session
        deadline_s   absolute, on the event loop's clock: the whole session, prefill included, must fit
        Raises `LayoutMismatch` when a message cannot fit the staging buffers, `NoSecret`.
        """
        self._staging.require(plan.largest_message_bytes)
        return IncomingTransfer(plan, Verifier(secret), self._transport, self._staging, land, deadline_s, self._clock)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A payload in staging, and its page hashes, which may not be known yet."""

    message: PlannedMessage
    envelope: Envelope
    buffer: Buffer
    payload: Buffer
    page_hashes: Awaitable[PageHashes]


class IncomingTransfer(Transfer[ReceiverEvent, ReceivePayload | Land]):
    """One session's receiving end, and the listener of its nonce. For the event loop's thread."""

    def __init__(
        self,
        plan: TransferPlan,
        verifier: Verifier,
        transport: Transport,
        staging: Staging,
        land: LandMessage,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        totals = transport.stats.received
        super().__init__(plan, ReceiverSession(plan).on, transport, totals, staging, deadline_s, clock)
        self._verifier = verifier
        self._refused_parts = 0
        self._land = land
        self._to_receive: deque[PlannedMessage] = deque()
        self._arrived: deque[_Arrived] = deque()
        self._to_land: deque[PlannedMessage] = deque()
        self._digest = plan_digest(plan)
        self._envelope: Envelope | None = None
        self._stop_watching: Callable[[], None] = lambda: None
        self._queue: asyncio.Queue[Arrival | None] = asyncio.Queue()
        self._taking: Arrival | None = None
        """It may wait for staging: its sender must not, once the session has ended."""
        transport.expect(plan.nonce, self)
        self._spawn(self._run())

    async def landed(self) -> Landed:
        """Until every message has landed.

        Raises `TransferFailed`. Either way `land` is not running any more and will not be called again: the
        blocks and the slot are the caller's to use or to give back.
        """
        await self._wait()
        assert self._envelope is not None
        return Landed(self._envelope.first_token, self._stats())

    def announced(self, arrival: Arrival) -> None:
        """The transport has a part for us."""
        if self._ended:
            arrival.drop()
        else:
            self._queue.put_nowait(arrival)

    def _move(self, instruction: ReceivePayload | Land) -> None:
        match instruction:
            case ReceivePayload(message):
                self._to_receive.append(message)
            case Land(message):
                self._to_land.append(message)
            case _:
                assert_never(instruction)

    def _ending(self) -> None:
        self._transport.forget(self.plan.nonce)
        self._stop_watching()
        self._drop(self._taking)
        while not self._queue.empty():
            self._drop(self._queue.get_nowait())
        self._queue.put_nowait(None)

    @staticmethod
    def _drop(arrival: Arrival | None) -> None:
        if arrival is not None:
            arrival.drop()

    async def _run(self) -> None:
        """One part at a time, in order of arrival; `None` follows the session's end."""
        while (arrival := await self._queue.get()) is not None:
            self._taking = arrival
            if arrival.tag.is_payload:
                await self._take_payload(arrival)
            else:
                await self._take_envelope(arrival)

    async def _take_envelope(self, arrival: Arrival) -> None:
        data = np.empty(ENVELOPE_BYTES, np.uint8)
        try:
            self._verifier.check_size(arrival.num_bytes)
            await arrival.receive(data, self._deadline_s, None)
            envelope = self._verifier.verify_envelope(data.tobytes())
        except Unauthenticated as refused:
            self._refuse(arrival, refused)
            return
        except MalformedEnvelope as error:
            self._on(Broken(Cause.MALFORMED, str(error)))
            return
        first = self._envelope is None
        self._envelope = envelope
        self._on(EnvelopeArrived(arrival.tag.index, envelope))
        if first and not self._ended:
            self._began_s = self._clock()
            self._stop_watching = self._transport.watch(envelope.connection, self._peer_lost)

    def _refuse(self, arrival: Arrival, refused: Unauthenticated) -> None:
        """Whoever sent it knows the nonce and not the secret; the session waits for the one who knows both."""
        arrival.drop()
        self._transport.stats.part_refused(refused.cause)
        self._refused_parts += 1
        if self._refused_parts == 1:  # a stranger must not fill the log
            log.warning("a part of a session of %d tokens was refused, %s", self.plan.num_tokens, refused)

    def _peer_lost(self, reason: str) -> None:
        self._on(PeerLost(reason))

    async def _take_payload(self, arrival: Arrival) -> None:
        """Return when the payload lies in staging; verifying and landing it overlap with receiving the next."""
        try:
            self._verifier.verify_payload(arrival.tag.index)
        except Unauthenticated as refused:
            self._refuse(arrival, refused)
            return
        try:
            self._on(PayloadAnnounced(arrival.tag.index, arrival.num_bytes))
            while self._to_receive:
                await self._receive(arrival, self._to_receive.popleft())
        finally:
            arrival.drop()

    async def _receive(self, arrival: Arrival, message: PlannedMessage) -> None:
        envelope, arrived = self._envelope, None
        assert envelope is not None
        buffer = await self._take_staging(message)
        try:
            if not self._ended:
                payload = buffer[: message.num_bytes]
                await arrival.receive(payload, self._deadline_s, envelope.connection)
                self._on(PayloadArrived(message.index))
            if not self._ended:
                arrived = _Arrived(message, envelope, buffer, payload, self._staging.memory.page_hashes(payload))
        finally:
            if arrived is None:
                self._give_staging(message, buffer)
        if arrived is not None:
            self._arrived.append(arrived)
            if len(self._arrived) == 1:
                self._spawn(self._land_arrived())

    async def _land_arrived(self) -> None:
        """One by one, while others are received; until there is none left. All buffers come back."""
        while self._arrived:
            arrived, has_landed = self._arrived[0], False
            try:
                await self._verify(arrived)
                while self._to_land:
                    await self._at_callers_blocks(self._scatter(self._to_land.popleft(), arrived.payload))
                    has_landed = True
            except Exception as error:
                self._broken_by(error)
            self._arrived.popleft()
            self._give_staging(arrived.message, arrived.buffer)
            if has_landed:
                self._on(MessageLanded(arrived.message.index))

    async def _verify(self, arrived: _Arrived) -> None:
        """Compares the digest with the envelope's. When it returns, nothing but a landing reads the payload."""
        hashes = await arrived.page_hashes
        if self._ended:
            return
        self._digest = message_digest(self._digest, arrived.envelope.fields(), hashes)
        self._on(PayloadChecked(arrived.message.index, digest_ok=self._digest == arrived.envelope.digest))

    async def _scatter(self, message: PlannedMessage, payload: Buffer) -> None:
        try:
            await self._land(message, payload)
        finally:  # what it had enqueued before it failed may not find the blocks, or the buffer, another's
            await self._staging.memory.finished()
