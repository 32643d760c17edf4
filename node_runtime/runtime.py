"""The running parts of a node that its roles work with: engine, transport, staging, config."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headrace.cache.conversion import conversion_refusal
from headrace.cache.layout import CacheLayout
from headrace.engine.build import BuiltEngine
from headrace.engine.engine import Engine
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import Sequence
from headrace.forward.memory import CacheMemory
from headrace.tracing import NoTracing, Tracing
from headrace.wire.tls import Identity
from node_runtime.config import RuntimeConfig
from node_runtime.packing import Packing, packing_of
from node_runtime.router_calls import RouterCalls
from node_runtime.token_feeds import TokenFeeds
from transfer.backend import Transport
from transfer.protocol.errors import LayoutMismatch
from transfer.staging import Staging


@dataclass(frozen=True)
class NodeRuntime:
    """A started node without its roles.

    outgoing  buffers of the transfers from this node, whichever role sends
    incoming  buffers of the transfers to this node. A pool for each direction: a buffer here comes back when this node
              has landed it, whatever other nodes do, and one of `outgoing` when its receiver has found one there. In
              one pool for both, nodes that send to each other could wait for each other in a circle
    identity  this node's TLS certificate; None: plain text
    watchers  called when the status has news that routers should get before the next heartbeat is due
    calls     calls in progress, by router
    feeds     in which routers get the tokens of all their requests
    tasks     clean-up work in progress
    tracing   makes spans of routers' calls, or none
    """

    config: RuntimeConfig
    built: BuiltEngine
    loop: EngineLoop
    transport: Transport
    outgoing: Staging
    incoming: Staging
    identity: Identity | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    calls: RouterCalls = field(default_factory=RouterCalls)
    feeds: TokenFeeds = field(default_factory=TokenFeeds)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    tracing: Tracing = field(default_factory=NoTracing)

    @property
    def engine(self) -> Engine:
        return self.built.engine

    @property
    def memory(self) -> CacheMemory:
        return self.built.memory

    @property
    def layout(self) -> CacheLayout:
        """How this node keeps blocks and states."""
        return self.built.layout

    @property
    def wire_layout(self) -> CacheLayout:
        """The layout in which other nodes send to this one: its own, but for `state_wire_dtype`."""
        return self.layout.on_wire(self.config.state_wire_dtype)

    @cached_property
    def packing(self) -> Packing:
        """Copies between cache memory and staging buffers."""
        return packing_of(self.memory, self.loop, self.outgoing.memory)

    def status_changed(self) -> None:
        """Has the watchers called."""
        for watcher in self.watchers:
            watcher()

    async def submit(self, sequence: Sequence) -> None:
        """Hashes a fresh sequence, compiles its grammar, and submits it. Raises BadRequest.

        A long prompt is hashed in parts, between which the event loop does other work: it takes a millisecond.
        """
        intake = self.engine.intake
        for _ in intake.hash_prompt(sequence):
            await asyncio.sleep(0)
        if sequence.request.sampling.grammar is not None:
            await asyncio.to_thread(intake.compile_grammar, sequence)
        self.loop.post(lambda: self.engine.submit(sequence))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs clean-up work that outlives the request that started it; the node waits for it when it stops."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def require_layout(self, peers: CacheLayout) -> None:
        """Raises LayoutMismatch unless this node can exchange blocks and states with a peer of this layout."""
        difference = conversion_refusal(self.layout, peers)
        if difference is not None:
            remedy = "restart one of the two nodes with the other's setting; speculation.drafter: mtp is one"
            raise LayoutMismatch(f"{difference}: {remedy}")
