"""Nodes without engines, behind `headrace.wire.client.NodeClient`.

The token at place k after the prompt is `answer[k]` on every node, so an answer that several nodes produced in turn is
right only if no token was lost or shown twice. Each call takes one fault from its node's list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.request import Alternative, FinishReason, Logprobs, PromptLogprobs, Request, Token
from headrace.wire import messages as m
from headrace.wire.cache_updates import CacheUpdate
from headrace.wire.errors import NodeError, NodeLost, TransferBroken
from headrace.wire.node_messages import NodeInfo, NodeStatus, PoolStatus, Role

LAYOUT = CacheLayout("fake", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(2, (8, 3), (2, 8, 8)),))


def pool_status(total: int = 64) -> PoolStatus:
    return PoolStatus(total=total, free=total, cached=0, in_use=0, indexed=0)


def node_status() -> NodeStatus:
    return NodeStatus(0, 0, pool_status(), pool_status(8), {"steps": 3.0})


def node_info(name: str, role: Role, **changes: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "incarnation": 1,
        "address": f"{name}:1",
        "transfer_address": f"{name}:2",
        "layout": LAYOUT,
        "max_model_tokens": 2048,
        "num_blocks": 64,
        "num_slots": 8,
        "pid": 1,
        "device": "cpu",
        "max_message_bytes": 1 << 20,
        "transfer_version": 2,
    }
    return NodeInfo(name=name, role=role, **(values | changes))


def reservation(nonce: int) -> m.Reservation:
    return m.Reservation(nonce, 32, 40, "d0:2", LAYOUT, 30.0, bytes(32))


def fetch_source(name: str, num_tokens: int) -> m.FetchSource:
    """The decode node of `node_info` as a fetch source."""
    info = node_info(name, Role.DECODE)
    return m.FetchSource(name, info.address, num_tokens, info.layout.block_size)


@dataclass(frozen=True)
class Fault:
    """Raises `error` in a call: at once, or after the call has sent that many tokens.

    is_computing   a prefill reports first that it computes
    is_outlived    a lost node was only out of reach; otherwise a successor answers in its place
    """

    error: NodeError
    after_tokens: int = 0
    is_computing: bool = False
    is_outlived: bool = False


@dataclass
class Transfers:
    """Landed transfers by nonce; shared by the nodes of a fake cluster."""

    landed: dict[int, asyncio.Event] = field(default_factory=dict)

    def reserve(self) -> int:
        nonce = len(self.landed) + 1
        self.landed[nonce] = asyncio.Event()
        return nonce


class FakeNode:
    """Computes prompts, samples the first token, transfers and decodes; with faults, and a record of the calls.

    num_lost_transfers   how many of its next transfers never land
    hold_done            delays the reports of its prefills
    tokens_per_event     decoded tokens
    gate                 each event of decoded tokens takes one permit
    """

    role: Role
    num_lost_transfers = 0
    hold_done: asyncio.Event | None = None
    tokens_per_event = 1
    gate: asyncio.Semaphore | None = None
    step_s = 0.0
    wants_local = False

    def __init__(
        self,
        name: str,
        answer: Sequence[int],
        transfers: Transfers,
        *,
        eos_id: int | None = None,
        resumed_tokens: int = 0,
    ) -> None:
        self.name = name
        self.answer = answer
        self.transfers = transfers
        self.eos_id = eos_id
        self.resumed_tokens = resumed_tokens
        self.faults: list[Fault] = []
        self.hangs = False  # its calls send nothing
        self.requests: list[Request] = []
        self.fetch_sources: list[m.FetchSource | None] = []  # of its prefills
        self.updates: asyncio.Queue[CacheUpdate | NodeError] = asyncio.Queue()  # of its cache
        self.num_subscriptions = 0
        self.is_followed = False
        self.answers: asyncio.Event | None = asyncio.Event()  # to questions, once it is set; None: they fail
        self.answers.set()
        self.incarnation = 1  # in its answers
        self.num_questions = 0
        self.open_calls = 0
        self.closed = False
        self.switched_to: list[Role] = []
        self.loses_switches = False
        self.is_stopped = False
        self.can_halt = True
        self.hold_halt: asyncio.Event | None = None
        self.commands: list[m.DecodeCommand] = []
        self.abandoned: list[str] = []

    def take_fault(self) -> Fault | None:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and type(fault.error) is NodeLost and not fault.is_outlived:
            self.incarnation += 1
        return fault

    def token(self, request: Request, place: int) -> tuple[Token, FinishReason | None]:
        """The token at `place` after the prompt, with the finish reason if it is the last."""
        sampling = request.sampling
        token_id = self.answer[place % len(self.answer)]
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple(Alternative((token_id + i) % 256, -0.5 - i) for i in range(sampling.logprobs))
            logprobs = Logprobs(-0.5, top)
        finish = None
        is_eos = token_id == self.eos_id and not sampling.ignore_eos
        if place + 1 >= sampling.min_tokens and (is_eos or token_id in sampling.stop_token_ids):
            finish = FinishReason.STOP
        elif place + 1 >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        return Token(token_id, logprobs), finish

    def prompt_logprobs(self, request: Request) -> Iterator[PromptLogprobs]:
        """Of three tokens a part."""
        end, num_top = request.num_prompt_tokens, request.sampling.prompt_logprobs or 0
        for start in range(1, max(end, 2), 3):
            count = min(end - start, 3)
            top_ids = tuple(range(num_top)) * count
            yield PromptLogprobs(start, (-1.0,) * count, top_ids, (-1.0,) * len(top_ids))

    async def close(self) -> None:
        assert self.open_calls == 0, f"{self.name} was closed under {self.open_calls} calls"
        assert not self.is_followed, f"{self.name} was closed while its cache was followed"
        self.closed = True

    def prefill(self, request: m.PrefillRequest, *, timeout_s: float) -> FakePrefillCall:
        return FakePrefillCall(self, request)

    def decode(self, start: m.Start, *, timeout_s: float) -> FakeDecodeCall:
        return FakeDecodeCall(self, start)

    async def describe(self, *, timeout_s: float) -> tuple[NodeInfo, NodeStatus]:
        self.num_questions += 1
        if self.answers is None:
            raise NodeLost(self.name, "nobody is there")
        await self.answers.wait()
        return node_info(self.name, self.role, incarnation=self.incarnation), node_status()

    async def switch_role(self, role: Role, *, timeout_s: float) -> int:
        if self.loses_switches:
            raise NodeLost(self.name, "nobody is there")
        self.switched_to.append(role)
        return len(self.switched_to)

    async def stop(self, *, timeout_s: float) -> None:
        if self.loses_switches:
            raise NodeLost(self.name, "nobody is there")
        self.is_stopped = True

    def cache_updates(self) -> FakeCacheUpdatesCall:
        return FakeCacheUpdatesCall(self)


class FakePrefillNode(FakeNode):
    role = Role.PREFILL


class FakeDecodeNode(FakeNode):
    role = Role.DECODE


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
        node.requests.append(start.request)

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
                yield event
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise
        except NodeError:
            self._is_lost = True
            raise

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
            tokens = []
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
        request, transfers = self._start.request, self._node.transfers
        while True:
            nonce = transfers.reserve()
            address = f"{self._node.name}:2"
            yield m.Reservation(nonce, 32, len(request.tokens), address, LAYOUT, 30.0, bytes(32))
            landed = asyncio.create_task(transfers.landed[nonce].wait())
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


class FakeCluster:
    """Fake nodes by name. `connect` opens clients for a RouterServer or a NodeTable."""

    def __init__(self, *nodes: FakePrefillNode | FakeDecodeNode) -> None:
        self.nodes = {node.name: node for node in nodes}

    def connect(self, info: NodeInfo) -> FakePrefillNode | FakeDecodeNode:
        return self.nodes[info.name]

    def infos(self) -> list[NodeInfo]:
        return [node_info(node.name, node.role) for node in self.nodes.values()]


def fake_cluster(
    answer: Sequence[int], *, prefill: int = 1, decode: int = 1, eos_id: int | None = None, resumed_tokens: int = 0
) -> FakeCluster:
    """Nodes p0, p1, ... and d0, d1, ... with the same answer."""
    transfers = Transfers()
    return FakeCluster(
        *(
            FakePrefillNode(f"p{i}", answer, transfers, eos_id=eos_id, resumed_tokens=resumed_tokens)
            for i in range(prefill)
        ),
        *(
            FakeDecodeNode(f"d{i}", answer, transfers, eos_id=eos_id, resumed_tokens=resumed_tokens)
            for i in range(decode)
        ),
    )
