"""Nodes without engines, behind `headrace.wire.client.NodeClient`.

The token at place k after the prompt is `answer[k]` on every node, so an answer that several nodes produced in turn is
right only if no token was lost or shown twice. Each call takes one fault from its node's list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.request import Alternative, FinishReason, Logprobs, PromptLogprobs, Request, Token
from headrace.wire import messages as m
from headrace.wire.cache_updates import CacheUpdate
from headrace.wire.errors import NodeError, NodeLost
from headrace.wire.node_messages import NodeInfo, NodeStatus, PoolStatus, Role
from tests.support.router.fake_calls import FakeCacheUpdatesCall, FakeDecodeCall, FakePrefillCall

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
    has_feed             plain tokens may be taken at once, as those of a feed; False: all come as events of their call
    """

    role: Role
    num_lost_transfers = 0
    hold_done: asyncio.Event | None = None
    tokens_per_event = 1
    gate: asyncio.Semaphore | None = None
    step_s = 0.0
    wants_local = False
    has_feed = True

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
        self.num_taken = 0  # of its tokens, at once
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

    def reserve(self, num_tokens: int) -> m.Reservation:
        nonce = self.transfers.reserve()
        return m.Reservation(nonce, 32, num_tokens, f"{self.name}:2", LAYOUT, 30.0, bytes(32))

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
