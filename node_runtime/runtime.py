"""The running parts of a node that its role works with: engine, transport, staging, config."""

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
from headrace.forward.memory import CacheMemory
from headrace.wire.tls import Identity
from node_runtime.config import NodeConfig
from node_runtime.packing import Packing, packing_of
from node_runtime.router_calls import RouterCalls
from transfer.backend import Transport
from transfer.protocol.errors import LayoutMismatch
from transfer.staging import Staging, StagingConfig


@dataclass(frozen=True)
class NodeRuntime:
    """A started node without its role.

    staging   buffers for the transfers of requests. Fetches, which go from decode to prefill nodes, use `new_staging`:
              one pool that both a sender and a receiver take buffers from can deadlock
    identity  this node's TLS certificate; None: plain text
    watchers  called when the status has news that routers should get before the next heartbeat is due
    calls     calls in progress, by router
    tasks     clean-up work in progress
    """

    config: NodeConfig
    built: BuiltEngine
    loop: EngineLoop
    transport: Transport
    staging: Staging
    identity: Identity | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    calls: RouterCalls = field(default_factory=RouterCalls)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

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
        return packing_of(self.memory, self.loop, self.staging.memory)

    def status_changed(self) -> None:
        """Has the watchers called."""
        for watcher in self.watchers:
            watcher()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs clean-up work that outlives the request that started it; the node waits for it when it stops."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def new_staging(self, num_buffers: int) -> Staging:
        """Another pool of buffers as large as those of `staging`."""
        config = StagingConfig(num_buffers, self.staging.buffer_bytes)
        return Staging(config, self.staging.memory, self.staging.waits)

    def require_layout(self, peers: CacheLayout) -> None:
        """Raises LayoutMismatch unless this node can exchange blocks and states with a peer of this layout."""
        difference = conversion_refusal(self.layout, peers)
        if difference is not None:
            raise LayoutMismatch(f"{difference}: restart one of the two nodes with the other's setting")
