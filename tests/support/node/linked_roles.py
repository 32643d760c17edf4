"""A prefill role and a decode role in this process, each with an engine of its own, linked without sockets.

For faults that no real process commits on demand: bytes that change on their way, a peer that dies in the middle.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from decode_node.config import DecodeNodeConfig
from decode_node.exports import Exports
from decode_node.role import Decode
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.loop import EngineLoop
from headrace.wire.errors import CheckpointGone, HandoverBroken, RequestRefused
from headrace.wire.messages import (
    DecodeDone,
    DecodeReport,
    Donor,
    ExportReply,
    ExportRequest,
    FirstToken,
    PrefillDone,
    PrefillReport,
    PrefillRequest,
    Request,
    Reservation,
    Start,
    Tokens,
    TransferReport,
)
from node_runtime.config import NodeConfig
from node_runtime.errors import CheckpointGone as GoneHere
from node_runtime.runtime import Chassis
from prefill_node.config import LearnFromDecodeConfig, PrefillNodeConfig
from prefill_node.role import Prefill
from tests.support.engine.driving import SMALL
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.backend import Transport
from transfer.protocol.errors import HandoverFailed, LayoutMismatch
from transfer.staging import Staging, StagingConfig

TIMEOUT_S = 60.0
ALWAYS = LearnFromDecodeConfig(min_tokens=1, max_time_ratio=1e9)
DONOR = "d0"


class LocalDonor:
    """A line to `exports`, with the errors that gRPC would bring. `before` runs ahead of each call."""

    def __init__(self, exports: Exports) -> None:
        self.exports = exports
        self.before: Callable[[], None] = lambda: None
        self.reply: Callable[[ExportReply], ExportReply] = lambda reply: reply
        self.requests: list[ExportRequest] = []

    async def export(self, request: ExportRequest, *, timeout_s: float) -> ExportReply:
        self.requests.append(request)
        self.before()
        try:
            return self.reply(await self.exports.run(request, timeout_s))
        except GoneHere as error:
            raise CheckpointGone(DONOR, str(error)) from error
        except LayoutMismatch as error:
            raise RequestRefused(DONOR, str(error)) from error
        except HandoverFailed as error:
            raise HandoverBroken(DONOR, str(error)) from error

    async def close(self, grace_s: float | None = None) -> None:
        """Nothing is open."""


@dataclass
class Answer:
    """What a request got, and from whom."""

    tokens: list[int] = field(default_factory=list)
    reserved: Reservation | None = None
    moved: TransferReport | None = None
    prefill: PrefillReport | None = None
    decode: DecodeReport | None = None


@dataclass
class Linked:
    prefill: Prefill
    prefill_chassis: Chassis
    decode: Decode
    decode_chassis: Chassis
    donor: LocalDonor

    async def generate(self, request: Request) -> list[int]:
        """By the decode node alone, which computes the prompt itself."""
        tokens: list[int] = []
        async for event in self.decode.run(Start(request, may_prefill_remotely=False), _none(), TIMEOUT_S):
            if isinstance(event, Tokens):
                tokens += [token.id for token in event.tokens]
        return tokens

    async def answer(self, request: Request, donor_tokens: int | None = None) -> Answer:
        """By both, as a router has them work together; the prompt is computed by the prefill node."""
        answer = Answer()
        donor = None if donor_tokens is None else self.known(donor_tokens)
        async for event in self.decode.run(Start(request), _none(), TIMEOUT_S):
            match event:
                case Reservation():
                    answer.reserved = event
                    prefilling = asyncio.create_task(self._prefill(PrefillRequest(request, event, donor=donor), answer))
                case Tokens(tokens):
                    await prefilling  # its first token goes before
                    answer.tokens += [token.id for token in tokens]
                case TransferReport():
                    answer.moved = event
                case DecodeDone(_, report):
                    answer.decode = report
        return answer

    async def _prefill(self, request: PrefillRequest, answer: Answer) -> None:
        async for event in self.prefill.run(request, TIMEOUT_S):
            match event:
                case FirstToken(token):
                    answer.tokens.append(token.id)
                case PrefillDone(report):
                    answer.prefill = report

    async def first_token(self, request: Request, donor_tokens: int | None) -> tuple[int, PrefillReport]:
        """By the prefill node, which hands over to nobody; None: it knows of no donor."""
        donor = None if donor_tokens is None else self.known(donor_tokens)
        events = [e async for e in self.prefill.run(PrefillRequest(request, donor=donor), TIMEOUT_S)]
        first, done = events
        assert isinstance(first, FirstToken) and isinstance(done, PrefillDone)
        return first.token.id, done.report

    def known(self, num_tokens: int) -> Donor:
        """The decode node, as the router names it to the prefill node."""
        chassis = self.decode_chassis
        return Donor(DONOR, "nowhere", num_tokens, chassis.built.layout.block_size, chassis.staging.buffer_bytes)

    async def settled(self) -> None:
        """Until both nodes have given everything back; their pools hold together."""
        async with asyncio.timeout(TIMEOUT_S):
            for chassis in (self.prefill_chassis, self.decode_chassis):
                while chassis.tasks:
                    await asyncio.gather(*chassis.tasks)
                await chassis.loop.call(partial(_check_idle, chassis.built.engine))


@asynccontextmanager
async def linked(
    model: Path,
    *,
    learn: LearnFromDecodeConfig = ALWAYS,
    distort: Callable[[Transport], Transport] = lambda transport: transport,
    max_message_bytes: int = 1 << 20,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[Linked]:
    """`distort` wraps the prefill node's transport; `prefill` and `decode` change their configs."""
    network = InProcessNetwork()
    common: dict[str, Any] = {"model_path": str(model), "engine": SMALL, "max_message_bytes": max_message_bytes}
    prefill_config = PrefillNodeConfig("p0", learn_from_decode=learn, **common | (prefill or {}))
    decode_config = DecodeNodeConfig(DONOR, **common | (decode or {}))
    prefill_chassis = _chassis(prefill_config, distort(InProcessTransport(network, "p0")))
    decode_chassis = _chassis(decode_config, InProcessTransport(network, DONOR))
    donor = LocalDonor(Exports(decode_chassis))
    role = Prefill(prefill_chassis, prefill_config, lambda _: donor)
    try:
        yield Linked(role, prefill_chassis, Decode(decode_chassis, decode_config), decode_chassis, donor)
    finally:
        await role.close()
        for chassis in (prefill_chassis, decode_chassis):
            await chassis.transport.close()
            await chassis.loop.stop(TIMEOUT_S)


def _chassis(config: NodeConfig, transport: Transport) -> Chassis:
    clock = asyncio.get_running_loop().time
    built = build_engine(config.model_path, config.engine, clock)
    loop = EngineLoop(built.engine, clock, _crashed)
    loop.start()
    buffer_bytes = max(config.message_bytes, built.layout.max_state_bytes)
    staging = Staging(StagingConfig(config.staging_buffers, buffer_bytes))
    return Chassis(config, built, loop, transport, staging, set())


def _crashed(error: BaseException) -> None:
    raise error


def _check_idle(engine: Engine) -> None:
    stats = engine.cache.stats()
    assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)
    assert (engine.num_running, engine.num_waiting, len(engine.leases)) == (0, 0, 0)
    engine.cache.check()


async def _none() -> AsyncIterator[Any]:
    return
    yield
