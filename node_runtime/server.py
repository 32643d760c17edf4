"""A node's life cycle: start engine, transport and gRPC server, register with the routers, and stop all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import ChainMap
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol

from headrace.config import ConfigError
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.host_memory import keep_few_programs, keep_freed_memory
from headrace.engine.loop import EngineLoop
from headrace.forward.memory import use_device
from headrace.host_process import machine_id
from headrace.tracing import open_tracing
from headrace.wire.cache_updates import CacheUpdate
from headrace.wire.client import GrpcFetchClient
from headrace.wire.messages import FetchReply, FetchRequest, FetchSource
from headrace.wire.node_messages import NodeInfo, NodeStatus, Role
from headrace.wire.server import ControlServer
from headrace.wire.tls import load_identity
from node_runtime.cache_feed import CacheFeed
from node_runtime.config import RuntimeConfig
from node_runtime.fetch import Fetches
from node_runtime.fetch_server import FetchServer
from node_runtime.link_monitor import LinkMonitor
from node_runtime.packing import staging_memory
from node_runtime.registration import Registrations
from node_runtime.runtime import NodeRuntime
from node_runtime.service import add_node_service
from node_runtime.status import node_status, transfer_counters
from node_runtime.watchdog import Watchdog
from transfer.backend import Transport
from transfer.protocol.envelope import VERSION
from transfer.staging import Staging, StagingConfig
from transfer.ucx import open_transport

log = logging.getLogger(__name__)

SERVICE = "headrace-node"  # in traces
STATUS_TIMEOUT_S = 0.25  # a heartbeat goes out even while a long step keeps the engine busy
STOP_TIMEOUT_S = 60.0  # for the engine's step in progress
WARM_UP_TIMEOUT_S = 60.0  # for a staging buffer that nobody else can hold yet


EngineBuilder = Callable[[str, EngineConfig, Callable[[], float]], BuiltEngine]
"""Builds the engine of a model's folder, a config and a clock, as `build_engine` does."""


class RoleService(Protocol):
    """A role that serves requests: its counters (no two roles have one of the same name), its orphans, how to end those
    that their router needs no longer, and how to close what it opened."""

    def counters(self) -> dict[str, float]: ...
    def orphans(self) -> tuple[str, ...]: ...
    async def abandon(self, request_ids: Sequence[str]) -> None: ...
    async def close(self) -> None: ...


class NodeServer:
    """Starts and stops a node.

    role      the one with which it starts, for routers to know; it serves every role all the time, and keeps the role
              that a router switched it to until it ends: a router that was restarted gets that from it
    host_id   of what ends together with this node; None: the machine
    services  by the name of each role's gRPC service: adds that to a gRPC server and returns the role
    build     builds the engine
    """

    def __init__(
        self,
        config: RuntimeConfig,
        role: Role,
        services: Mapping[str, Callable[[NodeRuntime, Fetches, Any], RoleService]],
        host_id: str | None = None,
        build: EngineBuilder = build_engine,
    ) -> None:
        self.config = config
        self._role = role
        self._role_switches = 0
        self._services = services
        self._host_id = host_id or machine_id()
        self._build = build
        self._roles: list[RoleService] = []
        self._incarnation = secrets.randbits(63) | 1
        self._closed = asyncio.Event()
        self._crash: BaseException | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._unfollow: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Loads the model, opens transport and server, registers. Raises what fails, with nothing left open."""
        if self._device == "cpu":
            keep_freed_memory()
            keep_few_programs()
        clock = asyncio.get_running_loop().time
        began_s = clock()
        identity = load_identity(self.config.tls, self.config.host)
        self._tracing = open_tracing(self.config.tracing, SERVICE, self.config.name)
        built = await asyncio.to_thread(self._build, self.config.model_path, self.config.engine, clock)
        if self.config.message_bytes < built.layout.block_bytes:
            raise ConfigError(
                f"max_message_bytes {self.config.message_bytes} < {built.layout.block_bytes}, the bytes of one "
                "block of this model: raise it"
            )
        self._engine = EngineLoop(built.engine, clock, self._crashed)
        if self._device == "cuda":  # a CPU's steps leave the lock while they compute, in the engine's thread
            self._unfollow = built.engine.right_of_way.followed_by(asyncio.get_running_loop())
        async with AsyncExitStack() as undo:
            memory = staging_memory(self.config.engine.device)
            ucx = replace(self.config.ucx, host=self.config.host, cuda=self._device == "cuda")
            transport: Transport = open_transport(ucx)
            undo.push_async_callback(transport.close)
            buffer_bytes = max(self.config.message_bytes, built.layout.max_state_bytes)
            staging = StagingConfig(self.config.staging_buffers, buffer_bytes)
            outgoing = Staging(staging, memory)
            incoming = Staging(staging, outgoing.memory, outgoing.waits)
            self._link_monitor = LinkMonitor(self.config.name, transport, outgoing.memory, self._device)
            undo.push_async_callback(self._link_monitor.close)
            self._cache_feed = CacheFeed(self._engine, built.journal, built.engine.cache, self._incarnation)
            self.runtime = NodeRuntime(
                self.config, built, self._engine, transport, outgoing, incoming, identity, tracing=self._tracing
            )
            self._fetches = Fetches(
                self.runtime, self.config.fetch_from_others, self._connect, self._link_monitor.bytes_per_s
            )
            self._fetch_server = FetchServer(self.runtime)
            await self.runtime.packing.warm_up(outgoing, clock() + WARM_UP_TIMEOUT_S)
            self._status = node_status(built)  # before the engine's first step, which may take long
            self._engine.post(lambda: use_device(self.config.engine.device))
            self._engine.start()
            undo.push_async_callback(self._engine.stop, STOP_TIMEOUT_S)
            self._watchdog = Watchdog(self.config.name, lambda: self._engine.turns, self.config.watchdog_s)
            self._watchdog.start()
            undo.callback(self._watchdog.stop)
            self._server = ControlServer(
                [*self._services, "Node"],
                self._add_services,
                identity,
                silence_s=self.config.control_silence_s,
            )
            undo.push_async_callback(self._server.stop, 0.0)
            port = await self._server.start(self.config.host, self.config.port)
            undo.pop_all()
        self.info = self._describe(f"{self.config.host}:{port}", start_s=clock() - began_s)
        self._registrations = Registrations(
            self.config.router_addresses,
            self.info,
            self.status,
            self._link_monitor.meet,
            self._abandon,
            identity,
            silence_s=self.config.control_silence_s,
        )
        self.runtime.watchers.append(self._registrations.beat_now)
        self._registrations.start()
        log.info("%s node %s serves at %s", self._role.value, self.config.name, self.info.address)

    async def status(self) -> NodeStatus:
        """The engine's status between two steps; the last one known while a step takes long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                self._status = await self._engine.call(lambda: node_status(self.runtime.built))
        transfers = transfer_counters(self.runtime.transport.stats, self.runtime.outgoing.waits)
        counted = [self._fetches.counters(), self._fetch_server.counters(), *(role.counters() for role in self._roles)]
        return replace(
            self._status,
            counters={**self._status.counters, **transfers, **dict(ChainMap(*counted))},
            links=self._link_monitor.report(),
            calls=self.runtime.calls.counts(),
            orphans=tuple(request_id for role in self._roles for request_id in role.orphans()),
            stalled_s=self._watchdog.stalled_s,
            role=self._role,
            role_switches=self._role_switches,
        )

    def cache_updates(self) -> AsyncGenerator[CacheUpdate, None]:
        """Yields a snapshot of the cache, then every change; ends when the node stops."""
        return self._cache_feed.updates()

    async def fetch(self, request: FetchRequest, timeout_s: float) -> FetchReply:
        """Sends another node what it wants to fetch; see `FetchServer.run`."""
        return await self._fetch_server.run(request, timeout_s)

    def switch_role(self, role: Role) -> int:
        """Changes the role that routers get with every status, the next one at once. Requests end where they are.

        Returns how often that was done: of two routers that switch at once, both end with the role of the later switch.
        """
        self._role = role
        self._role_switches += 1
        log.info("node %s has the role %s now", self.config.name, role.value)
        self.runtime.status_changed()
        return self._role_switches

    async def stop(self) -> None:
        """Leaves the routers, ends requests in flight after the grace period, and releases everything.

        Idempotent. Raises what could not be ended; the node is closed all the same.
        """
        self.begin_to_stop()
        assert self._stopping is not None
        await asyncio.shield(self._stopping)

    def begin_to_stop(self) -> None:
        """As `stop`, without waiting; `wait_closed` waits."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        try:
            await self._registrations.stop(leave=self._crash is None)
            self._cache_feed.close()
            self.runtime.feeds.close()
            await self._server.stop(self.config.shutdown_grace_s)
            if self.runtime.tasks:
                await asyncio.wait(self.runtime.tasks, timeout=self.config.shutdown_grace_s)
            for role in self._roles:
                await role.close()
            await self._fetches.close()
            await self._link_monitor.close()
            await self.runtime.transport.close()
            if self._crash is None:
                await self._engine.stop(STOP_TIMEOUT_S)
            self._watchdog.stop()
        finally:
            self._unfollow()
            await asyncio.to_thread(self._tracing.close)
            self._closed.set()

    async def wait_closed(self) -> None:
        """Waits until the node has ended, by `stop` or by a crash of its engine, which it raises again."""
        await self._closed.wait()
        if self._crash is not None:
            raise self._crash

    def _crashed(self, error: BaseException) -> None:
        self._crash = error
        self._stopping = self._stopping or asyncio.create_task(self._stop())

    def _add_services(self, server: Any) -> None:
        self._roles = [serve(self.runtime, self._fetches, server) for serve in self._services.values()]
        add_node_service(server, self)

    def _abandon(self, request_ids: Sequence[str]) -> None:
        for role in self._roles:
            self.runtime.spawn(role.abandon(request_ids))

    def _connect(self, fetch_source: FetchSource) -> GrpcFetchClient:
        return GrpcFetchClient(fetch_source, self.runtime.identity, silence_s=self.config.control_silence_s)

    def _describe(self, address: str, *, start_s: float) -> NodeInfo:
        built = self.runtime.built
        return NodeInfo(
            name=self.config.name,
            role=self._role,
            incarnation=self._incarnation,
            address=address,
            transfer_address=self.runtime.transport.address,
            layout=built.layout,
            max_model_tokens=built.max_model_tokens,
            num_blocks=built.sizes.num_blocks,
            num_slots=built.sizes.num_slots,
            pid=os.getpid(),
            device=self._device,
            max_message_bytes=self.config.message_bytes,
            transfer_version=VERSION,
            start_s=start_s,
            max_step_tokens=self.config.engine.max_step_tokens,
            host_id=self._host_id,
            num_packed_slots=built.sizes.num_packed_slots,
        )

    @property
    def _device(self) -> str:
        return self.config.engine.device.partition(":")[0]
