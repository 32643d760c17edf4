"""What every node runs: an engine in its thread, a transport, a gRPC server, a line to the router."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from headrace.cache.layout import CacheLayout
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import ConfigError
from headrace.engine.host_memory import keep_freed_memory
from headrace.engine.loop import EngineLoop
from headrace.forward.memory import use_device
from headrace.wire.messages import NodeInfo, NodeStatus, Role
from headrace.wire.server import ControlServer
from headrace.wire.tls import load_identity
from node_runtime.cache_feed import CacheFeed
from node_runtime.config import NodeConfig
from node_runtime.links import Links
from node_runtime.packing import Packing, packing_of, staging_memory
from node_runtime.registration import Registration
from node_runtime.status import node_status, transfer_counters
from transfer.backend import Transport
from transfer.protocol.envelope import VERSION
from transfer.protocol.errors import LayoutMismatch
from transfer.staging import Staging, StagingConfig
from transfer.ucx import open_transport

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 0.25  # a heartbeat goes out even while a long step keeps the engine
STOP_TIMEOUT_S = 60.0  # for the engine's step in progress
WARM_UP_TIMEOUT_S = 60.0  # for a staging buffer that nobody else can hold yet


@dataclass(frozen=True)
class Chassis:
    """A started node without its role: what the role's service works with.

    `staging` is for the hand-overs of requests. What prefill nodes fetch from decode nodes goes the other way
    and through `new_staging` of its own: one pool that both a sender and a receiver hold from can deadlock.
    """

    config: NodeConfig
    built: BuiltEngine
    loop: EngineLoop
    transport: Transport
    staging: Staging
    tasks: set[asyncio.Task[None]]

    @cached_property
    def packing(self) -> Packing:
        """The way between the cache's memory and staging."""
        return packing_of(self.built.memory, self.loop, self.staging.memory)

    @property
    def wire_layout(self) -> CacheLayout:
        """What is handed over to this node arrives in this layout."""
        return self.built.layout.on_wire(self.config.state_wire_dtype)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs clean-up work that must go on when the request that began it is gone."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def new_staging(self, num_buffers: int) -> Staging:
        """Another pool of buffers as large as those of `staging`."""
        config = StagingConfig(num_buffers, self.staging.buffer_bytes)
        return Staging(config, self.staging.memory, self.staging.waits)

    def require_layout(self, peers: CacheLayout) -> None:
        """Raises LayoutMismatch unless hand-overs between a peer of this layout and this node are possible."""
        difference = self.built.layout.unconvertible(peers)
        if difference is not None:
            raise LayoutMismatch(f"{difference}: restart one of the two nodes with the other's setting")


class RoleService(Protocol):
    """What a role adds to the chassis: its gRPC service, its own counters, and what it has to close."""

    def counters(self) -> dict[str, float]: ...
    async def close(self) -> None: ...


class Node:
    """Starts and stops a node of one role.

    `services` names the role's gRPC services; `serve(chassis, server, describe)` adds them to a server and
    returns the role. `closed` is set when the node has ended, by `stop` or by a crash of its engine.
    """

    def __init__(
        self,
        config: NodeConfig,
        role: Role,
        service: str,
        serve: Callable[..., RoleService],
    ) -> None:
        self.config = config
        self._role = role
        self._service = service
        self._serve = serve
        self._incarnation = secrets.randbits(63) | 1
        self._closed = asyncio.Event()
        self._crash: BaseException | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._status: NodeStatus | None = None

    async def start(self) -> None:
        """Loads the model, opens transport and server, registers. Raises what fails, with nothing left open."""
        if self._device == "cpu":
            keep_freed_memory()
        clock = asyncio.get_running_loop().time
        self.identity = load_identity(self.config.tls, self.config.host)
        built = await asyncio.to_thread(build_engine, self.config.model_path, self.config.engine, clock)
        if self.config.message_bytes < built.layout.block_bytes:
            raise ConfigError(
                f"max_message_bytes {self.config.message_bytes} < {built.layout.block_bytes}, the bytes of one "
                "block of this model: raise it"
            )
        self._engine = EngineLoop(built.engine, clock, self._crashed)
        async with AsyncExitStack() as undo:
            memory = staging_memory(self.config.engine.device)
            ucx = replace(self.config.ucx, host=self.config.host, cuda=self._device == "cuda")
            self._transport: Transport = open_transport(ucx)
            undo.push_async_callback(self._transport.close)
            buffer_bytes = max(self.config.message_bytes, built.layout.max_state_bytes)
            staging = Staging(StagingConfig(self.config.staging_buffers, buffer_bytes), memory)
            self._links = Links(self.config.name, self._transport, staging.memory, self._device)
            undo.push_async_callback(self._links.close)
            self.cache_feed = CacheFeed(self._engine, built.journal, built.engine.cache, self._incarnation)
            self.chassis = Chassis(self.config, built, self._engine, self._transport, staging, set())
            await self.chassis.packing.warm_up(staging, clock() + WARM_UP_TIMEOUT_S)
            self._engine.post(lambda: use_device(self.config.engine.device))
            self._engine.start()
            undo.push_async_callback(self._engine.stop, STOP_TIMEOUT_S)
            self._server = ControlServer([self._service, "Node"], self._add_services, self.identity)
            undo.push_async_callback(self._server.stop, 0.0)
            port = await self._server.start(self.config.host, self.config.port)
            undo.pop_all()
        self.info = self._describe(f"{self.config.host}:{port}")
        self._registration: Registration | None = None
        if self.config.router_address is not None:
            self._registration = Registration(
                self.config.router_address, self.info, self.status, self._links.meet, self.identity
            )
            self._registration.start()
        log.info("%s node %s serves at %s", self._role.value, self.config.name, self.info.address)

    async def status(self) -> NodeStatus:
        """Fresh between two steps; the last known one while a step takes long."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                self._status = await self._engine.call(lambda: node_status(self.chassis.built))
        except TimeoutError:
            if self._status is None:
                raise
        transfers = transfer_counters(self._transport.stats, self.chassis.staging.waits)
        counters = {**self._status.counters, **transfers, **self._role_service.counters()}
        return replace(self._status, counters=counters, links=self._links.report())

    async def stop(self) -> None:
        """Leaves the router, ends requests in flight after the grace period, and gives everything back.

        The same however often it is called. Raises what could not be ended; the node is closed all the same.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._registration is not None:
                await self._registration.stop()
            self.cache_feed.close()
            await self._server.stop(self.config.shutdown_grace_s)
            if self.chassis.tasks:
                await asyncio.wait(self.chassis.tasks, timeout=self.config.shutdown_grace_s)
            await self._role_service.close()
            await self._links.close()
            await self._transport.close()
            if self._crash is None:
                await self._engine.stop(STOP_TIMEOUT_S)
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """Until the node has ended. Raises what its engine crashed of."""
        await self._closed.wait()
        if self._crash is not None:
            raise self._crash

    def _crashed(self, error: BaseException) -> None:
        self._crash = error
        self._stopping = self._stopping or asyncio.create_task(self._stop())

    def _add_services(self, server: Any) -> None:
        self._role_service = self._serve(self.chassis, server, self)

    def _describe(self, address: str) -> NodeInfo:
        built = self.chassis.built
        return NodeInfo(
            name=self.config.name,
            role=self._role,
            incarnation=self._incarnation,
            address=address,
            transfer_address=self._transport.address,
            layout=built.layout,
            max_model_tokens=built.max_model_tokens,
            num_blocks=built.sizes.num_blocks,
            num_slots=built.sizes.num_slots,
            pid=os.getpid(),
            device=self._device,
            max_message_bytes=self.chassis.staging.buffer_bytes,
            transfer_version=VERSION,
        )

    @property
    def _device(self) -> str:
        return self.config.engine.device.partition(":")[0]
