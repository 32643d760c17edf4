"""Calls on the nodes of fake_nodes.py, as `headrace.wire.client.NodeClient` opens them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from headrace.request import FinishReason, Token
from headrace.wire import messages as m
from headrace.wire.cache_updates import CacheUpdate
from headrace.wire.errors import NodeError, TransferBroken

if TYPE_CHECKING:
    from tests.support.router.fake_nodes import FakeNode


class _Call:
    def __init__(self, node: FakeNode) -> None:
        self._opened_on = node

    async def __aenter__(self) -> Any:
        self._opened_on.open_calls += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._opened_on.open_calls -= 1


class FakeCacheUpdatesCall:
    """Streams the node's `updates`; raises those that are errors."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        node.num_subscriptions += 1

    async def __aenter__(self) -> FakeCacheUpdatesCall:
        self._node.is_followed = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._node.is_followed = False

    async def __aiter__(self) -> AsyncIterator[CacheUpdate]:
        while True:
            update = await self._node.updates.get()
            if isinstance(update, NodeError):
                raise update
            yield update


class FakePrefillCall(_Call):
    def __init__(self, node: FakeNode, work: m.PrefillRequest) -> None:
        super().__init__(node)
        self._node, self._work = node, work
        node.requests.append(work.request)
        node.fetch_sources.append(work.fetch_source)

    async def __aiter__(self) -> AsyncIterator[m.PrefillEvent]:
        node, request = self._node, self._work.request
        if node.hangs:
            await asyncio.Event().wait()
        fault = node.take_fault()
        if fault is not None and fault.is_computing:
            yield m.ComputeStarted()
        if fault is not None and fault.after_tokens == 0:
            raise fault.error
        await asyncio.sleep(0)
        if request.sampling.prompt_logprobs is not None:
            for part in node.prompt_logprobs(request):
                yield part
        token, finish = node.token(request, len(request.tokens) - request.num_prompt_tokens)
        if self._work.first_token is not None:
            assert token.id == self._work.first_token, "the router must repeat the token that was shown"
        yield m.FirstToken(token, finish)
        if fault is not None:
            raise fault.error
        if node.num_lost_transfers:
            node.num_lost_transfers -= 1
        elif self._work.reservation is not None:
            node.transfers.landed[self._work.reservation.nonce].set()
        if node.hold_done is not None:
            await node.hold_done.wait()
        computed = len(request.tokens) - node.resumed_tokens
        yield m.PrefillDone(
            m.PrefillReport(node.name, node.resumed_tokens, node.resumed_tokens, node.resumed_tokens, computed, (16,))
        )


class FakeDecodeCall(_Call):
    def __init__(self, node: FakeNode, start: m.Start) -> None:
        super().__init__(node)
        self._node, self._start = node, start
        self._renewed: asyncio.Queue[m.Renew] = asyncio.Queue()
        self._moves: asyncio.Queue[m.Halt | m.HandOver | m.GoOn] = asyncio.Queue()
        self._stopped = False
        self._is_over = False
        self._is_lost = self._was_cancelled = False
        self._take: Callable[[m.Tokens], None] | None = None
        self._may_take: Callable[[], bool] = lambda: False
        node.requests.append(start.request)

    def take_with(self, take: Callable[[m.Tokens], None], may_take: Callable[[], bool]) -> None:
        self._take, self._may_take = take, may_take

    async def send(self, command: m.DecodeCommand) -> None:
        self._node.commands.append(command)
        if isinstance(command, m.Renew):
            self._renewed.put_nowait(command)
        elif isinstance(command, m.Stop):
            self._stopped = True
        elif isinstance(command, m.Halt | m.HandOver | m.GoOn):
            self._moves.put_nowait(command)

    async def abandon(self) -> bool:
        may_be_kept = self._start.request.is_resumable and not self._is_over
        if may_be_kept and not self._was_cancelled and not self._is_lost:
            self._node.abandoned.append(self._start.request.request_id)
        return may_be_kept

    async def __aiter__(self) -> AsyncIterator[m.DecodeEvent]:
        try:
            async for event in self._events():
                self._is_over = isinstance(event, m.DecodeDone | m.HandedOver)
                if self._is_fed(event) and self._take is not None and self._may_take():
                    self._node.num_taken += len(event.tokens)
                    self._take(event)
                else:
                    yield event
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise
        except NodeError:
            self._is_lost = True
            raise

    def _is_fed(self, event: m.DecodeEvent) -> TypeGuard[m.Tokens]:
        """True for tokens that a real node puts into its router's feed."""
        if not (self._node.has_feed and isinstance(event, m.Tokens)):
            return False
        return event.finish is None and all(token.logprobs is None for token in event.tokens)

    async def _events(self) -> AsyncIterator[m.DecodeEvent]:
        node, request = self._node, self._start.request
        if node.hangs:
            await asyncio.Event().wait()
        fault = node.take_fault()
        if fault is not None and fault.after_tokens == 0 and not isinstance(fault.error, TransferBroken):
            raise fault.error
        place = len(request.tokens) - request.num_prompt_tokens
        if not self._start.is_handed_over and (node.wants_local or not self._start.may_prefill_remotely):
            yield m.LocalPrefill(node.resumed_tokens)
            if request.sampling.prompt_logprobs is not None:
                for part in node.prompt_logprobs(request):
                    yield part
            state = "resumed" if node.resumed_tokens else "computed"
        else:
            breaks = fault is not None and isinstance(fault.error, TransferBroken)
            async for event in self._receive(breaks):
                yield event
            place += 1
            state = "received"
        finish, sent = None, 0
        while finish is None and not self._stopped:
            if not self._moves.empty():
                assert self._moves.get_nowait() == m.Halt()
                if node.hold_halt is not None:
                    await node.hold_halt.wait()
                yield m.HaltReply(node.can_halt)
                if node.can_halt and isinstance(command := await self._moves.get(), m.HandOver):
                    async for event in self._hand_over(command.reservation, place):
                        yield event
                    return
            if fault is not None and 0 < fault.after_tokens <= sent:
                raise fault.error
            tokens: list[Token] = []
            while finish is None and len(tokens) < node.tokens_per_event:
                token, finish = node.token(request, place)
                tokens.append(token)
                place += 1
            if node.gate is not None:
                await node.gate.acquire()
            await asyncio.sleep(node.step_s)
            yield m.Tokens(tuple(tokens))
            sent += len(tokens)
        report = m.DecodeReport(node.name, 32, 16, state, 0, (32,))
        yield m.DecodeDone(finish or FinishReason.STOP, report)

    async def _hand_over(self, reservation: m.Reservation, place: int) -> AsyncIterator[m.DecodeEvent]:
        """Sends to another fake node of the same cluster, unless a fault is due."""
        assert reservation.num_tokens == self._start.request.num_prompt_tokens + place - 1, "all tokens but the last"
        if (fault := self._node.take_fault()) is not None:
            raise fault.error
        if self._node.num_lost_transfers:
            self._node.num_lost_transfers -= 1
        else:
            self._node.transfers.landed[reservation.nonce].set()
        yield m.HandedOver()

    async def _receive(self, breaks: bool) -> AsyncIterator[m.DecodeEvent]:
        """Reserves, and waits until a prefill node's transfer lands."""
        request = self._start.request
        while True:
            reservation = self._node.reserve(len(request.tokens))
            nonce = reservation.nonce
            yield reservation
            landed = asyncio.create_task(self._node.transfers.landed[nonce].wait())
            renewed = asyncio.create_task(self._renewed.get())
            try:
                await asyncio.wait({landed, renewed}, return_when=asyncio.FIRST_COMPLETED)
                if landed.done() and breaks:
                    breaks = False
                    yield m.SessionFailed(nonce, "a message's digest differs")
                    await renewed
                if not renewed.done():
                    yield m.TransferReport(8, 65536, 786432, 0.0021)
                    return
                assert renewed.result().failed_nonce == nonce
            finally:
                landed.cancel()
                renewed.cancel()
