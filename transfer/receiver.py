"""Receiving end of a transfer: receives the messages of one session's plan, verifies them and lands them.

incoming = receiver.expect(plan, secret=new_secret(), land=scatter_blocks, deadline_s=loop.time() + 30)
landed = await incoming.landed()
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np

from transfer.backend import Arrival, Transport
from transfer.buffers import StagingBuffer
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
from transfer.transfer import Transfer, TransferLimits

log = logging.getLogger(__name__)

LandMessage: TypeAlias = Callable[[PlannedMessage, StagingBuffer], Awaitable[None]]
"""Scatters the buffer's payload, of exactly `message.num_bytes`, into the message's blocks and slot. By its return that
is done, or enqueued on the staging memory's stream."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A session that has landed whole. first_token: what the sender passed to `finish`."""

    first_token: int | None
    stats: TransferStats


class TransferReceiver:
    """Expects transfers over one transport and one staging pool. A sender needs another pool."""

    def __init__(self, transport: Transport, staging: Staging, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._staging = staging
        self._clock = clock

    def expect(
        self, plan: TransferPlan, *, secret: bytes, land: LandMessage, deadline_s: float, timeout_s: float = math.inf
    ) -> "IncomingTransfer":
        """Takes the messages of this plan's nonce from now on; call it before the sender gets the reservation.

        secret       with which the sender must sign: a `new_secret()` for each session
        deadline_s   of the whole session, prefill included; absolute, on the event loop's clock
        timeout_s    the longest time between two messages: it begins with the first envelope that was proven the
                     sender's, because until then the prompt may stand in the sender's line
        Raises `LayoutMismatch` when a message cannot fit the staging buffers, `NoSecret`.
        """
        self._staging.require(plan.largest_message_bytes)
        limits = TransferLimits(deadline_s, timeout_s)
        return IncomingTransfer(plan, Verifier(secret), self._transport, self._staging, land, limits, self._clock)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A payload in staging, and its page hashes, which may not be known yet."""

    message: PlannedMessage
    envelope: Envelope
    buffer: StagingBuffer
    page_hashes: Awaitable[PageHashes]


class IncomingTransfer(Transfer[ReceiverEvent, ReceivePayload | Land]):
    """One session's receiving end, and the listener of its nonce. Call its methods in the event loop's thread."""

    def __init__(
        self,
        plan: TransferPlan,
        verifier: Verifier,
        transport: Transport,
        staging: Staging,
        land: LandMessage,
        limits: TransferLimits,
        clock: Callable[[], float],
    ) -> None:
        totals = transport.stats.received
        super().__init__(plan, ReceiverSession(plan).on, transport, totals, staging, limits, "", clock)
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
        """The part being received. It may wait for staging; once the session has ended its sender must not wait."""
        transport.expect(plan.nonce, self)
        self._spawn(self._run())

    async def landed(self) -> Landed:
        """Waits until every message has landed.

        Raises `TransferFailed`. Either way `land` is not running any more and will not be called again: the caller may
        use the blocks and the slot, or give them back.
        """
        await self._wait()
        assert self._envelope is not None
        return Landed(self._envelope.first_token, self._stats())

    def announced(self, arrival: Arrival) -> None:
        """Called by the transport with a part of this session."""
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

    def _stop(self) -> None:
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
        """Takes one part at a time, in order of arrival, until the `None` of the session's end."""
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
        self._progressed()
        first = self._envelope is None
        self._envelope = envelope
        self._on(EnvelopeArrived(arrival.tag.index, envelope))
        if first and not self._ended:
            self._began_s = self._clock()
            self._stop_watching = self._transport.watch(envelope.connection, self._peer_lost)

    def _refuse(self, arrival: Arrival, refused: Unauthenticated) -> None:
        """Drops and counts a part whose sender knows the nonce but not the secret. The session continues."""
        arrival.drop()
        self._transport.stats.part_refused(refused.cause)
        self._refused_parts += 1
        if self._refused_parts == 1:  # a stranger must not be able to fill the log
            log.warning("a part of a session of %d tokens was refused, %s", self.plan.num_tokens, refused)

    def _peer_lost(self, reason: str) -> None:
        self._on(PeerLost(reason))

    async def _take_payload(self, arrival: Arrival) -> None:
        """Returns when the payload is in staging; verifying and landing it overlap with receiving the next."""
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
                await arrival.receive(buffer.payload, self._deadline_s, envelope.connection)
                self._on(PayloadArrived(message.index))
            if not self._ended:
                arrived = _Arrived(message, envelope, buffer, self._staging.memory.page_hashes(buffer))
        finally:
            if arrived is None:
                self._give_staging(message, buffer)
        if arrived is not None:
            self._arrived.append(arrived)
            if len(self._arrived) == 1:
                self._spawn(self._land_arrived())

    async def _land_arrived(self) -> None:
        """Verifies and lands arrived payloads one by one, while others are received, and gives their buffers back."""
        while self._arrived:
            arrived, has_landed = self._arrived[0], False
            try:
                await self._verify(arrived)
                while self._to_land:
                    await self._at_callers_blocks(self._scatter(self._to_land.popleft(), arrived.buffer))
                    has_landed = True
            except Exception as error:
                self._broken_by(error)
            self._arrived.popleft()
            self._give_staging(arrived.message, arrived.buffer)
            if has_landed:
                self._on(MessageLanded(arrived.message.index))

    async def _verify(self, arrived: _Arrived) -> None:
        """Compares the payload's digest with its envelope's. Afterwards only a landing may read the payload."""
        hashes = await arrived.page_hashes
        if self._ended:
            return
        self._digest = message_digest(self._digest, arrived.envelope.fields(), hashes)
        self._on(PayloadChecked(arrived.message.index, digest_ok=self._digest == arrived.envelope.digest))

    async def _scatter(self, message: PlannedMessage, buffer: StagingBuffer) -> None:
        try:
            await self._land(message, buffer)
        finally:  # copies enqueued before an error must be done before the blocks and the buffer go to others
            await self._staging.memory.finished()
