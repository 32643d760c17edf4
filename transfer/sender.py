"""Sending end of a transfer: packs messages as their tokens are computed, and sends them in order.

outgoing = sender.open(plan, peer, secret=..., pack=gather_blocks, deadline_s=loop.time() + 30)
outgoing.tokens_computed(2048)          # after each chunk
outgoing.finish(first_token=42)         # after the first token is sampled
stats = await outgoing.done()
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import numpy as np

from transfer.backend import Connection, Transport
from transfer.buffers import StagingBuffer
from transfer.protocol.authentication import require_secret, sign
from transfer.protocol.digest import PageHashes, message_digest, plan_digest
from transfer.protocol.envelope import Envelope, Tag, require_token
from transfer.protocol.events import (
    MessageSent,
    PeerLost,
    SenderEvent,
    SendMessage,
    StateFinal,
    TokensComputed,
)
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.protocol.session import SenderSession
from transfer.protocol.stats import TransferStats, TransferTotals
from transfer.staging import Staging
from transfer.transfer import Transfer, TransferLimits

Pack: TypeAlias = Callable[[PlannedMessage, StagingBuffer], Awaitable[None]]
"""Fills the buffer's payload, of exactly `message.num_bytes`, with the message's blocks and state. By its return the
payload is filled, or that is enqueued on the staging memory's stream."""


class TransferSender:
    """Opens transfers over one transport and one staging pool. A receiver needs another pool."""

    def __init__(self, transport: Transport, staging: Staging, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._staging = staging
        self._clock = clock

    def open(
        self,
        plan: TransferPlan,
        peer: str,
        *,
        secret: bytes,
        pack: Pack,
        deadline_s: float,
        timeout_s: float = math.inf,
    ) -> "OutgoingTransfer":
        """Starts a session with the receiver at `peer`; connects at once.

        secret       issued by the receiver for this session, see `transfer.protocol.authentication`
        deadline_s   of the whole session, prefill included; absolute, on the event loop's clock
        timeout_s    the longest time in which no tokens were computed and no message was taken over
        Raises `LayoutMismatch` when a message cannot fit the staging buffers, `NoSecret`.
        """
        self._staging.require(plan.largest_message_bytes)
        require_secret(secret)
        limits = TransferLimits(deadline_s, timeout_s)
        return OutgoingTransfer(plan, peer, secret, self._transport, self._staging, pack, limits, self._clock)


class OutgoingTransfer(Transfer[SenderEvent, SendMessage]):
    """One session's sending end. Call its methods in the event loop's thread."""

    def __init__(
        self,
        plan: TransferPlan,
        peer: str,
        secret: bytes,
        transport: Transport,
        staging: Staging,
        pack: Pack,
        limits: TransferLimits,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(plan, SenderSession(plan).on, transport, transport.stats.sent, staging, limits, peer, clock)
        self._secret = secret
        self._pack = pack
        self._moving.computing(True)
        self._first_token: int | None = None
        self._digest = plan_digest(plan)
        self._queue: asyncio.Queue[PlannedMessage | None] = asyncio.Queue()
        self._progressed()
        self._spawn(self._run(peer))

    def tokens_computed(self, num_tokens: int) -> None:
        """Reports that the prompt's first `num_tokens` are in their blocks; never fewer than before."""
        self._progressed()
        self._on(TokensComputed(num_tokens))

    def finish(self, first_token: int | None = None) -> None:
        """Reports that the state is final, and the first token if one was sampled: they are sent together.

        Raises `LayoutMismatch` when the token does not fit the envelope's field.
        """
        if first_token is not None:
            require_token(first_token)
        self._first_token = first_token
        self._moving.computing(False)
        self._progressed()
        self._on(StateFinal())

    async def done(self) -> TransferStats:
        """Waits until the transport has taken over every message; the receiver reports when they have landed.

        Raises `TransferFailed`. Either way `pack` is not running any more and will not be called again.
        """
        await self._wait()
        return self._stats()

    def _completed(self, stats: TransferStats) -> None:
        super()._completed(stats)
        self._transport.stats.sent_to.setdefault(self._peer, TransferTotals()).add(stats)

    def _move(self, instruction: SendMessage) -> None:
        self._queue.put_nowait(instruction.message)

    def _stop(self) -> None:
        self._queue.put_nowait(None)

    async def _run(self, peer: str) -> None:
        connection = await self._transport.connect(peer, self._deadline_s)
        stop_watching = connection.watch(lambda reason: self._on(PeerLost(reason)))
        try:
            while (message := await self._queue.get()) is not None and not self._ended:
                await self._pack_and_send(connection, message)
        finally:
            stop_watching()

    async def _pack_and_send(self, connection: Connection, message: PlannedMessage) -> None:
        """Returns when it is being sent: messages are packed one by one, and sending overlaps with packing the next."""
        buffer = await self._take_staging(message)
        sent: tuple[asyncio.Future[None], ...] = ()
        try:
            if not self._ended:
                hashes = await self._at_callers_blocks(self._fill(message, buffer))
            if not self._ended:
                sent = self._post(connection, message, buffer, hashes)
        finally:
            self._when_taken_over(message, buffer, sent)

    def _when_taken_over(
        self, message: PlannedMessage, buffer: StagingBuffer, parts: tuple[asyncio.Future[None], ...]
    ) -> None:
        """Gives the buffer back and reports the message when its parts are done, at once if it has none. No task waits
        for that."""
        under_way = [part for part in parts if not part.done()]

        def taken_over(part: asyncio.Future[None]) -> None:
            under_way.remove(part)
            if not under_way:
                over()

        def over() -> None:
            self._give_staging(message, buffer)
            errors = [error for part in parts if (error := part.exception()) is not None]
            if errors:
                self._broken_by(cast(Exception, errors[0]))
            elif parts:
                self._progressed()
                self._on(MessageSent(message.index))

        for part in tuple(under_way):
            part.add_done_callback(taken_over)
        if not under_way:
            over()

    async def _fill(self, message: PlannedMessage, buffer: StagingBuffer) -> PageHashes:
        """Packs the message; its page hashes are known only when the packing is done, on a GPU too."""
        await self._pack(message, buffer)
        return await self._staging.memory.page_hashes(buffer)

    def _post(
        self, connection: Connection, message: PlannedMessage, buffer: StagingBuffer, hashes: PageHashes
    ) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        nonce = self.plan.nonce
        first_token = self._first_token if message.state_bytes else None
        fields = Envelope.of(nonce, connection.id, message, first_token).fields()
        self._digest = message_digest(self._digest, fields, hashes)
        envelope = np.frombuffer(sign(fields + self._digest, self._secret), np.uint8)
        return (
            connection.send(Tag(nonce, message.index, False), envelope, self._deadline_s),
            connection.send(Tag(nonce, message.index, True), buffer.payload, self._deadline_s),
        )
