"""Two decode roles in this process, each with an engine of its own, linked without sockets: requests move from one to
the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from decode_node.role import DecodeRole
from headrace.request import Request
from headrace.wire.messages import DecodeCommand, DecodeDone, DecodeEvent, Start, Tokens
from node.config import NodeConfig
from node_runtime.runtime import NodeRuntime
from tests.support.engine.driving import SMALL
from tests.support.node.linked_roles import _check_idle, _runtime, without_sources
from tests.support.patience import PATIENCE_S
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.backend import Transport


class Call:
    """A decode call as a router makes it: commands may be sent at any time, events are read one by one."""

    def __init__(self, role: DecodeRole, start: Start) -> None:
        self._commands: asyncio.Queue[DecodeCommand] = asyncio.Queue()
        self._events = role.run(start, self._sent(), PATIENCE_S)
        self.tokens: list[int] = []

    def send(self, command: DecodeCommand) -> None:
        self._commands.put_nowait(command)

    async def next(self) -> DecodeEvent | None:
        """The next event; None after the last one. Tokens are kept in `tokens`, too."""
        event = await anext(self._events, None)
        if isinstance(event, Tokens):
            self.tokens += [token.id for token in event.tokens]
        return event

    async def until(self, *kinds: type) -> DecodeEvent:
        """The next event of one of these kinds."""
        while not isinstance(event := await self.next(), kinds):
            assert event is not None, f"the call ended without {kinds}"
        return event

    async def rest(self) -> list[DecodeEvent]:
        """All events that are left."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events

    async def end(self) -> list[int]:
        """Reads the call to its end; all its tokens."""
        await self.until(DecodeDone)
        await self.close()
        return self.tokens

    async def close(self) -> None:
        await self._events.aclose()

    async def _sent(self) -> AsyncIterator[DecodeCommand]:
        while True:
            yield await self._commands.get()


@dataclass
class DecodePair:
    roles: list[DecodeRole]
    runtimes: list[NodeRuntime]

    def call(self, index: int, request: Request, *, is_handed_over: bool = False) -> Call:
        """A call to node `index`, which computes the prompt itself unless it is handed over."""
        start = Start(request, may_prefill_remotely=is_handed_over, is_handed_over=is_handed_over)
        return Call(self.roles[index], start)

    @property
    def computed_tokens(self) -> int:
        return sum(runtime.engine.computed_tokens for runtime in self.runtimes)

    async def settled(self) -> None:
        """Waits until both nodes have given everything back; checks their pools."""
        async with asyncio.timeout(PATIENCE_S):
            for runtime in self.runtimes:
                while runtime.tasks:
                    await asyncio.gather(*runtime.tasks)
                await runtime.loop.call(partial(_check_idle, runtime.engine))


@asynccontextmanager
async def decode_pair(
    model: Path, *, distort: Callable[[Transport], Transport] = lambda transport: transport, **second: object
) -> AsyncIterator[DecodePair]:
    """`distort` wraps the second node's transport; `second` changes the second one's config."""
    network = InProcessNetwork()
    common = {"model_path": str(model), "engine": SMALL, "max_message_bytes": 1 << 20}
    configs = [NodeConfig("d0", **common), NodeConfig("d1", **common | second)]
    transports = [InProcessTransport(network, "d0"), distort(InProcessTransport(network, "d1"))]
    runtimes = [_runtime(config, transport) for config, transport in zip(configs, transports, strict=True)]
    roles = [DecodeRole(r, config, without_sources(r)) for r, config in zip(runtimes, configs, strict=True)]
    try:
        yield DecodePair(roles, runtimes)
    finally:
        for role, runtime in zip(roles, runtimes, strict=True):
            await role.close()
            await runtime.transport.close()
            await runtime.loop.stop(PATIENCE_S)
