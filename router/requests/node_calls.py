"""The calls of one request to its nodes: opens them, and passes their events on until they end.

What the events mean is the lifecycle's to say, and what is to be done the driver's: here a call that breaks becomes an
event, too, a node that answers nothing gets its limit, and no stream is read faster than the client reads its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from headrace.request import PromptLogprobs
from headrace.wire import messages as m
from headrace.wire.client import DecodeCall
from headrace.wire.errors import NodeError, NodeLost
from router.cluster.nodes import NodeEntry
from router.requests import events as ev
from router.requests.attempt import Attempt
from router.requests.context import RouterContext
from router.requests.lifecycle import RequestLifecycle
from router.requests.node_search import NodeSearch, Placement
from router.requests.outputs import OutputSink
from router.requests.responsive import responsive
from router.requests.states import Completed, Decoding, Moving

REPORT_GRACE_S = 1.0  # for the prefill node's report once the answer is complete

# Each token is asked for these: unions and states made anew for each of them took 2 % of the router's time, each.
_OUTPUTS = (m.Tokens, PromptLogprobs)
_ENDS = (m.DecodeDone, m.HandedOver)
_DECODING = Decoding()


class NodeCalls:
    """Decode and prefill calls of all attempts of one request.

    life     read alone: events change it by `handle`
    handle   takes an event of an attempt; returns when everything is done that it asks for
    take     the same at once, for tokens of an attempt that only need to be shown
    """

    def __init__(
        self,
        context: RouterContext,
        search: NodeSearch,
        life: RequestLifecycle,
        sink: OutputSink,
        handle: Callable[[Attempt, ev.Event], Awaitable[None]],
        take: Callable[[Attempt, m.Tokens], None],
        *,
        deadline_s: float,
    ) -> None:
        self._context = context
        self._search = search
        self._life = life
        self._sink = sink
        self._handle = handle
        self._take = take
        self._deadline_s = deadline_s

    async def decode(self, attempt: Attempt, node: NodeEntry, start: m.Start) -> None:
        """Follows the request on a decode node until the attempt is over, then leaves the call."""
        attempt.decode_node = node
        try:
            async with (
                self._context.nodes.in_use(node) as client,
                client.decode(start, timeout_s=self._remaining_s()) as call,
            ):
                attempt.call = call
                try:
                    await self._handle(attempt, ev.DecodeStarted(node.info.name))
                    attempt.spawn(self._read(attempt, node, call))
                    await attempt.over
                    if isinstance(self._life.state, Completed) and attempt.prefill is not None:
                        # The client has every token; only the final usage waits for the prefill node's report.
                        await asyncio.wait({attempt.prefill}, timeout=REPORT_GRACE_S)
                finally:
                    if await call.abandon():
                        self._context.nodes.left.add(node.id, start.request.request_id)
                await attempt.cancel()
        except NodeError as error:  # the call could not even be opened
            await self._handle(attempt, ev.DecodeLost(self._search.call_failed(node, error)))

    async def _read(self, attempt: Attempt, node: NodeEntry, call: DecodeCall) -> None:
        try:
            async with responsive(node, self._context.config.first_event_timeout_s) as limit:
                is_first = True
                async for event in call:
                    if is_first and not node.stalled:  # else the limit ends this call now
                        limit.reschedule(None)
                        is_first = False
                        call.take_with(partial(self._take, attempt), partial(self._may_take, attempt))
                    await self._handle(attempt, event)
                    if isinstance(event, _OUTPUTS) and not self._sink.has_room:
                        await self._wait_for_reader()
                    if isinstance(event, m.HandedOver) and attempt.successor is not None:
                        self._watch_landing(attempt.successor, node)
                    if isinstance(event, _ENDS) or attempt.over.done():
                        return
            raise NodeLost(node.info.name, "ended the call before the request was done")
        except NodeError as error:
            lost = self._search.call_failed(node, error)
            if attempt.successor is None:
                await self._handle(attempt, ev.DecodeLost(lost))
            else:
                await self._handle(attempt.successor, ev.SenderLost(lost))

    def _may_take(self, attempt: Attempt) -> bool:
        """True while tokens that are not the last ask for nothing but being shown, and there is room for them."""
        return self._life.state == _DECODING and not attempt.over.done() and self._sink.has_room

    async def prefill(self, attempt: Attempt, reservation: m.Reservation | None, first_token: int | None) -> None:
        """Has a prefill node compute the prompt for a reservation, or without one for its first token alone."""
        nonce = None if reservation is None else reservation.nonce
        placement = await self._prefill_placement(attempt)
        if placement is None:
            await self._handle(attempt, ev.PrefillFailed(nonce, None))
            return
        node = attempt.prefill_node = placement.prefill
        fetch_source = await self._search.fetch_source(attempt.request, placement)
        work = m.PrefillRequest(attempt.request, reservation, first_token, fetch_source)
        try:
            async with (
                self._context.nodes.in_use(node) as client,
                client.prefill(work, timeout_s=self._remaining_s()) as call,
                responsive(node, None),
            ):
                await self._handle(attempt, ev.PrefillStarted(node.info.name, nonce))
                async for event in call:
                    await self._handle(attempt, event)
                    if isinstance(event, _OUTPUTS) and not self._sink.has_room:
                        await self._wait_for_reader()
                    if isinstance(event, m.PrefillDone):
                        if nonce is not None:
                            attempt.spawn(self._fail_unless_landed(attempt, node, nonce))
                        return
            raise NodeLost(node.info.name, "ended the call before the prefill was done")
        except NodeError as error:
            await self._handle(attempt, ev.PrefillFailed(nonce, self._search.call_failed(node, error)))

    async def _prefill_placement(self, attempt: Attempt) -> Placement | None:
        """The attempt's plan; for a repeated prefill, or if its node is gone meanwhile, another one for the node that
        waits for it. None: nobody can send to that one."""
        placement, attempt.placement = attempt.placement, None
        if placement is not None and self._search.may_still(placement.prefill):
            return placement
        receiver = attempt.decode_node
        if receiver is None:
            return None
        is_suspect = self._life.failures.is_suspect
        return await self._search.place_prefill(attempt.request, receiver, is_suspect=is_suspect)

    def _watch_landing(self, attempt: Attempt, sender: NodeEntry) -> None:
        if isinstance(self._life.state, Moving):
            attempt.spawn(self._fail_unless_landed(attempt, sender, self._life.state.nonce))

    async def _fail_unless_landed(self, attempt: Attempt, node: NodeEntry, nonce: int) -> None:
        """Repeats a prefill whose transfer has not landed in time. A message that the network damaged may fail its
        authentication: the decode node drops it silently and would wait until the session's own, later deadline."""
        timeout_s = self._context.config.landing_timeout_s
        await asyncio.sleep(timeout_s)
        lost = NodeError(node.info.name, f"its transfer did not land within {timeout_s:g} s (landing_timeout_s)")
        await self._handle(attempt, ev.PrefillFailed(nonce, lost))

    async def _wait_for_reader(self) -> None:
        """Reads no more of a node's stream while the client has too much to read: gRPC's flow control then reaches the
        node. Only after an event with output, for the others are steps of a transfer, whose clock runs."""
        self._context.metrics.reader_fell_behind()
        await self._sink.room()

    def _remaining_s(self) -> float:
        return max(self._deadline_s - self._context.clock(), 0.001)
