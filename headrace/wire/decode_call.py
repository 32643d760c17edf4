"""A router's call of a decode node, and the feed in which the node sends the tokens of all its calls together."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Self

import grpc
import grpc.aio

from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.call_status import is_crash, node_error
from headrace.wire.errors import NodeError, NodeLost
from headrace.wire.fed_events import FedEvents
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.rounds import Rounds

FEED_METADATA = "headrace-feed"
"""Key of the metadata with which a call names its feed and itself there: FEED-CALL."""

CONFIRM_EVERY = 64
"""Tokens of the feed that a call reads before it tells the node so: a part of what the node feeds unread."""

STATUS_TIMEOUT_S = 1.0
"""How long to wait for the server's status after a write failed, or after the feed broke."""

FEED_TIMEOUT_S = 10.0
"""How long tokens of the feed may be missing once the call's own stream has ended."""

ABANDON_TIMEOUT_S = 1.0
"""How long sending `Abandon` may take: a node that is lost takes nothing, and keeps nothing either."""


class Inbox:
    """All that has arrived for one call, by its own stream and by the feed that it has joined, if any.

    metadata  names the feed to the node
    leave     to be called when the call is over
    deliver   called in a round after tokens of the feed have arrived
    """

    def __init__(self, metadata: tuple[tuple[str, str], ...] = (), leave: Callable[[], object] = lambda: None) -> None:
        self.metadata = metadata
        self.leave = leave
        self.events = FedEvents()
        self.news = asyncio.Event()
        self.deliver: Callable[[], None] = self.news.set
        self.is_cut_off = False
        """True once the feed broke: tokens may be lost."""


class RouterFeed:
    """The feed of one node: opened for the first call that joins, and again, under another number, once it broke.

    open_stream  opens the node's `Feed`
    rounds       pass on what arrives; all nodes' feeds share them
    """

    def __init__(
        self,
        open_stream: Callable[[pb.FeedRequest], grpc.aio.UnaryStreamCall[pb.FeedRequest, pb.FedTokens]],
        rounds: Rounds,
    ) -> None:
        self._open_stream = open_stream
        self._rounds = rounds
        self._reading: asyncio.Task[None] | None = None
        self._feed = 0
        self._call_numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._is_served = True

    def join(self) -> Inbox:
        """An inbox for one more call."""
        if self._reading is None or self._reading.done():
            if not self._is_served:
                return Inbox()
            self._feed = secrets.randbits(63)
            self._reading = asyncio.create_task(self._read(self._feed))
        number = next(self._call_numbers)
        name = ((FEED_METADATA, f"{self._feed}-{number}"),)
        self._inboxes[number] = Inbox(name, partial(self._inboxes.pop, number, None))
        return self._inboxes[number]

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _read(self, feed: int) -> None:
        try:
            async for message in self._open_stream(pb.FeedRequest(feed=feed)):
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self._is_served = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            if self._is_served:
                self._break_off()
        except Exception:  # such as lists of unequal length: a bug, for which no call may wait
            self._break_off()
            raise

    def _take(self, message: pb.FedTokens) -> None:
        ids, start = message.token_ids[:], 0
        for number, events_before, count in zip(message.calls, message.events_before, message.counts, strict=True):
            inbox = self._inboxes.get(number)
            if inbox is not None:
                inbox.events.add_fed(ids[start : start + count], events_before)
                self._rounds.add(inbox.deliver)
            start += count

    def _break_off(self) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.is_cut_off = True
            inbox.news.set()


class GrpcDecodeCall:
    """A `DecodeCall` over gRPC: one request on a decode node, whose events come by the call's stream and by the feed.

    call   not yet begun: entering the call sends `start`
    """

    def __init__(
        self,
        node: str,
        call: grpc.aio.StreamStreamCall[pb.DecodeCommand, pb.DecodeEvent],
        start: m.Start,
        inbox: Inbox,
    ) -> None:
        self._node = node
        self._call = call
        self._start = start
        self._inbox = inbox
        self._is_over = False
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._has_ended = asyncio.Event()  # the call's own stream
        self._room = asyncio.Event()
        self._unconfirmed = 0
        self._is_waiting = False  # for news
        self._taking_failed: Exception | None = None
        self._first_status: tuple[grpc.StatusCode, str | None] = (grpc.StatusCode.INTERNAL, None)
        call.add_done_callback(self._ended)

    async def __aenter__(self) -> Self:
        try:
            await self.send(self._start)
        except BaseException:
            self._inbox.leave()
            raise
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._inbox.leave()
        if self._reading is not None:
            self._reading.cancel()
        self._call.cancel()

    async def abandon(self) -> bool:
        """Announces that the call ends on purpose: a node keeps a resumable request whose call ends without a word.

        Call it before the call is left. Returns False for other requests, and for one that the node has ended; True:
        the node keeps it if the announcement does not arrive.
        """
        if not self._start.request.is_resumable or self._is_over:
            return False
        if not self._call.done():
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(ABANDON_TIMEOUT_S):
                    await self._call.write(codecs.encode_one_of(m.Abandon(), pb.DecodeCommand()))
        return True

    async def send(self, command: m.DecodeCommand | m.TokensRead) -> None:
        try:
            await self._call.write(codecs.encode_one_of(command, pb.DecodeCommand()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # the node ended the call, or is lost
            raise await self._why_it_ended() from error

    def take_with(self, take: Callable[[m.Tokens], None], may_take: Callable[[], bool]) -> None:
        """Has `take` called with tokens of the feed, without a task that would have to be woken for them.

        That is so while the call's reader waits and `may_take` returns True. All else the reader gets, and the error
        if one of the two raises it.
        """
        self._inbox.deliver = partial(self._deliver, take, may_take)

    def _deliver(self, take: Callable[[m.Tokens], None], may_take: Callable[[], bool]) -> None:
        """Never raises: others' tokens are passed on in the same round."""
        inbox = self._inbox
        try:
            if not self._is_waiting or inbox.events.has_events or not may_take():
                inbox.news.set()
                return
            fed_before = inbox.events.num_fed
            event = inbox.events.next()
            if isinstance(event, m.Tokens):
                take(event)
            self._unconfirmed += inbox.events.num_fed - fed_before
        except Exception as error:
            self._taking_failed = error
        if self._unconfirmed >= CONFIRM_EVERY or self._taking_failed is not None:
            inbox.news.set()

    async def __aiter__(self) -> AsyncIterator[m.DecodeEvent]:
        events = self._inbox.events
        while True:
            if self._unconfirmed >= CONFIRM_EVERY:
                await self._confirm()
            fed_before = events.num_fed
            event = events.next()
            if not events.has_events:
                self._room.set()
            if event is None:
                if not await self._more_arrives():
                    return
                continue
            self._is_over = isinstance(event, m.DecodeDone | m.HandedOver)
            yield event
            self._unconfirmed += events.num_fed - fed_before

    async def _more_arrives(self) -> bool:
        """Waits for something new; False if the call is over and all of it was read. Raises NodeError."""
        inbox = self._inbox
        if not self._has_ended.is_set() and not inbox.is_cut_off:
            self._is_waiting = True
            try:
                await inbox.news.wait()
            finally:
                self._is_waiting = False
            inbox.news.clear()
            if self._taking_failed is not None:
                raise self._taking_failed
            return True
        with suppress(TimeoutError):  # a node whose feed breaks may be about to end the call, and to say why
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self._has_ended.wait()
        if self._failure is not None:
            raise self._failure
        if self._has_ended.is_set() and not inbox.events.has_events:
            return False
        if inbox.is_cut_off:
            raise NodeLost(self._node, "its feed of tokens broke off")
        try:
            async with asyncio.timeout(FEED_TIMEOUT_S):
                await inbox.news.wait()
        except TimeoutError:
            raise NodeLost(self._node, f"tokens are missing {FEED_TIMEOUT_S:g} s after the end of the call") from None
        inbox.news.clear()
        return True

    async def _confirm(self) -> None:
        confirmed, self._unconfirmed = self._unconfirmed, 0
        with suppress(NodeError):  # the call has ended: what there is to read says how
            await self.send(m.TokensRead(confirmed))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._inbox.events.add_event(codecs.decode_one_of(message), message.fed_before)
                self._inbox.news.set()
                self._room.clear()
                await self._room.wait()  # gRPC holds the node back meanwhile
        except grpc.aio.AioRpcError:
            self._failure = await self._why_it_ended()
        except ValueError as error:
            self._failure = error
        finally:
            self._has_ended.set()
            self._inbox.news.set()

    async def _why_it_ended(self) -> NodeError:
        """Returns the node's own status as an error.

        A write to a call that has ended makes gRPC (1.85) set the status INTERNAL. The node's status comes soon after
        and replaces it, or it came before; in that case only the call's done callback has seen it.
        """
        give_up_s = time.monotonic() + STATUS_TIMEOUT_S
        status = self._first_status
        while status[0] is grpc.StatusCode.INTERNAL and not is_crash(*status) and time.monotonic() < give_up_s:
            await asyncio.sleep(0.001)
            status = await self._status()
        return node_error(self._node, *status)

    async def _status(self) -> tuple[grpc.StatusCode, str | None]:
        return await self._call.code(), await self._call.details()

    def _ended(self, _: object) -> None:
        try:
            self._status().send(None)  # available by now: does not wait
        except StopIteration as status:
            self._first_status = status.value
