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

from decode_node.role import DecodeRole
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.loop import EngineLoop
from headrace.request import Request
from headrace.wire.errors import CheckpointGone, RequestRefused, TransferBroken
from headrace.wire.messages import (
    DecodeDone,
    DecodeReport,
    FetchReply,
    FetchRequest,
    FetchSource,
    FirstToken,
    PrefillDone,
    PrefillReport,
    PrefillRequest,
    Reservation,
    Start,
    Tokens,
    TransferReport,
)
from node.config import NodeConfig
from node_runtime.config import FetchConfig, RuntimeConfig
from node_runtime.fetch import Fetches
from node_runtime.fetch_server import FetchServer
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import CheckpointMissing
from prefill_node.role import PrefillRole
from tests.support.engine.driving import SMALL
from tests.support.patience import PATIENCE_S
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.backend import Transport
from transfer.protocol.errors import LayoutMismatch, TransferFailed
from transfer.staging import Staging, StagingConfig

TIMEOUT_S = PATIENCE_S
ALWAYS = FetchConfig(min_tokens=1, max_time_ratio=1e9)
FETCH_SOURCE = "d0"


class LocalFetchSource:
    """A channel to a decode node's fetch server that raises gRPC's errors. `before` runs ahead of each call."""

    def __init__(self, fetch_server: FetchServer) -> None:
        self.fetch_server = fetch_server
        self.before: Callable[[], None] = lambda: None
        self.reply: Callable[[FetchReply], FetchReply] = lambda reply: reply
        self.requests: list[FetchRequest] = []

    async def fetch(self, request: FetchRequest, *, timeout_s: float) -> FetchReply:
        self.requests.append(request)
        self.before()
        try:
            return self.reply(await self.fetch_server.run(request, timeout_s))
        except CheckpointMissing as error:
            raise CheckpointGone(FETCH_SOURCE, str(error)) from error
        except LayoutMismatch as error:
            raise RequestRefused(FETCH_SOURCE, str(error)) from error
        except TransferFailed as error:
            raise TransferBroken(FETCH_SOURCE, str(error)) from error

    async def close(self, grace_s: float | None = None) -> None:
        """Nothing is open."""


@dataclass
class Answer:
    """The reports and the tokens that one request got from both nodes."""

    tokens: list[int] = field(default_factory=list)
    reserved: Reservation | None = None
    moved: TransferReport | None = None
    prefill: PrefillReport | None = None
    decode: DecodeReport | None = None


@dataclass
class Linked:
    prefill: PrefillRole
    prefill_runtime: NodeRuntime
    decode: DecodeRole
    decode_runtime: NodeRuntime
    fetch_source: LocalFetchSource
    fetches: Fetches

    async def generate(self, request: Request) -> list[int]:
        """Has the decode node alone answer; it computes the prompt itself."""
        tokens: list[int] = []
        async for event in self.decode.run(Start(request, may_prefill_remotely=False), _none(), TIMEOUT_S):
            if isinstance(event, Tokens):
                tokens += [token.id for token in event.tokens]
        return tokens

    async def answer(self, request: Request, fetch_source_tokens: int | None = None) -> Answer:
        """Has both nodes answer, as a router does; the prefill node computes the prompt."""
        answer = Answer()
        fetch_source = None if fetch_source_tokens is None else self.known(fetch_source_tokens)
        async for event in self.decode.run(Start(request), _none(), TIMEOUT_S):
            match event:
                case Reservation():
                    answer.reserved = event
                    prefilling = asyncio.create_task(
                        self._prefill(PrefillRequest(request, event, fetch_source=fetch_source), answer)
                    )
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

    async def first_token(self, request: Request, fetch_source_tokens: int | None) -> tuple[int, PrefillReport]:
        """Has the prefill node answer alone; `fetch_source_tokens` None: it knows of no fetch source."""
        fetch_source = None if fetch_source_tokens is None else self.known(fetch_source_tokens)
        events = [e async for e in self.prefill.run(PrefillRequest(request, fetch_source=fetch_source), TIMEOUT_S)]
        _, first, done = events
        assert isinstance(first, FirstToken) and isinstance(done, PrefillDone)
        return first.token.id, done.report

    def known(self, num_tokens: int) -> FetchSource:
        """The decode node as the router describes it to the prefill node."""
        runtime = self.decode_runtime
        return FetchSource(FETCH_SOURCE, "nowhere", num_tokens, runtime.layout.block_size)

    async def settled(self) -> None:
        """Waits until both nodes have given everything back; checks their pools."""
        async with asyncio.timeout(TIMEOUT_S):
            for runtime in (self.prefill_runtime, self.decode_runtime):
                while runtime.tasks:
                    await asyncio.gather(*runtime.tasks)
                    await asyncio.sleep(0)  # they leave the set in the loop's next turn, which gather may not wait for
                await runtime.loop.call(partial(_check_idle, runtime.engine))


@asynccontextmanager
async def linked(
    model: Path,
    *,
    fetch: FetchConfig = ALWAYS,
    distort: Callable[[Transport], Transport] = lambda transport: transport,
    max_message_bytes: int = 1 << 20,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[Linked]:
    """`distort` wraps the prefill node's transport; `prefill` and `decode` change their configs."""
    network = InProcessNetwork()
    common: dict[str, Any] = {"model_path": str(model), "engine": SMALL, "max_message_bytes": max_message_bytes}
    prefill_config = NodeConfig("p0", fetch_from_others=fetch, **common | (prefill or {}))
    decode_config = NodeConfig(FETCH_SOURCE, **common | (decode or {}))
    prefill_runtime = _runtime(prefill_config, distort(InProcessTransport(network, "p0")))
    decode_runtime = _runtime(decode_config, InProcessTransport(network, FETCH_SOURCE))
    decode_role = DecodeRole(decode_runtime, decode_config, without_sources(decode_runtime))
    fetch_source = LocalFetchSource(FetchServer(decode_runtime))
    fetches = Fetches(prefill_runtime, fetch, lambda _: fetch_source, lambda _: None)
    prefill_role = PrefillRole(prefill_runtime, fetches)
    try:
        yield Linked(prefill_role, prefill_runtime, decode_role, decode_runtime, fetch_source, fetches)
    finally:
        await fetches.close()
        await decode_role.close()
        for runtime in (prefill_runtime, decode_runtime):
            await runtime.transport.close()
            await runtime.loop.stop(TIMEOUT_S)


def without_sources(runtime: NodeRuntime) -> Fetches:
    """The fetches of a node that no request names a source for."""
    nobody: Any = None
    return Fetches(runtime, FetchConfig(), nobody, lambda _: None)


def _runtime(config: RuntimeConfig, transport: Transport) -> NodeRuntime:
    clock = asyncio.get_running_loop().time
    built = build_engine(config.model_path, config.engine, clock)
    loop = EngineLoop(built.engine, clock, _crashed)
    loop.start()
    buffer_bytes = max(config.message_bytes, built.layout.max_state_bytes)
    staging = StagingConfig(config.staging_buffers, buffer_bytes)
    return NodeRuntime(config, built, loop, transport, Staging(staging), Staging(staging))


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
