"""One running router: the HTTP server, the registry of nodes, and the tables that they share."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from headrace.tracing import Tracing, open_tracing
from headrace.wire.client import GrpcNodeClient, NodeClient
from headrace.wire.node_messages import NodeInfo
from headrace.wire.rounds import Rounds
from headrace.wire.server import ListenError
from headrace.wire.tls import TlsError, load_identity
from router.api.app import build_app
from router.api.clients import Clients
from router.api.completions import CompletionService
from router.api.responses_api.stored_responses import StoredResponses
from router.cluster.cluster_index import ClusterIndex
from router.cluster.liveness import Liveness
from router.cluster.nodes import NodeTable
from router.cluster.registry import registry_server
from router.cluster.role_changes import RoleChanges
from router.cluster.role_switch import RoleSwitch
from router.cluster.subscriptions import Subscriptions
from router.config import RouterConfig
from router.errors import RouterError
from router.http.server import HttpServer
from router.keys import KeySource
from router.metrics import RouterMetrics
from router.parsing.body_parser import BodyParser
from router.parsing.messages import WorkerSettings
from router.parsing.parser import RequestParser
from router.parsing.pool import WorkerPool
from router.requests.admission import Admission
from router.requests.context import RouterContext
from router.requests.drains import Drains
from router.requests.table import RequestTable
from router.routing.ledger import Ledger
from router.routing.plan import Policy
from router.routing.policies.by_name import POLICIES
from router.routing.snapshots import Snapshots
from router.status import ClusterStatus

log = logging.getLogger(__name__)

SERVICE = "headrace-router"  # in traces

START_ERRORS = (RouterError, ListenError, TlsError)
"""Errors of a router's start that its user can mend, beside ConfigError."""


class RouterServer:
    """Starts in a running event loop, of any thread.

    connect_to   opens the client to a registered node; None: over gRPC
    policy       chooses a plan for each request; None: the config's
    tracing      makes spans of requests; None: the config's

    Raises TlsError, ModelFolderError, ConfigError (a file of API keys that cannot be used).
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        connect_to: Callable[[NodeInfo], NodeClient] | None = None,
        policy: Policy | None = None,
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.name = config.name or f"{socket.gethostname()}:{config.control_port or os.getpid()}"
        identity = load_identity(config.tls, config.control_host)

        rounds = Rounds()

        def connect(info: NodeInfo) -> NodeClient:
            return GrpcNodeClient(
                info.name,
                info.address,
                identity,
                router=self.name,
                silence_s=config.control_silence_s,
                rounds=rounds,
            )

        self.nodes = NodeTable(
            config.heartbeat_s,
            clock,
            connect_to or connect,
            roles_are_fixed=config.roles == "fixed",
            stalled_after_s=config.stalled_after_s,
            node_return_timeout_s=config.node_return_timeout_s,
        )
        name = config.served_model_name
        settings = WorkerSettings(
            config.model_path,
            name,
            config.parse_special_tokens,
            config.generation_config == "model",
            config.parse_cpu_s,
            config.parse_memory_bytes,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            chat_template=config.chat_template,
            trust_request_chat_template=config.trust_request_chat_template,
        )
        tokens = settings.load_tokens(loads_literal=False)
        table = RequestTable()
        admission = Admission(
            config.max_concurrent,
            config.max_queue,
            max_per_client=config.max_concurrent_per_client,
            timeout_s=config.request_timeout_s,
            clock=clock,
            nodes_line_s=lambda num_tokens: self.context.prompt_wait_s(num_tokens),
            room_within_gap=lambda: self.context.room_within_gap(),
        )
        metrics = RouterMetrics(config.served_model_name, config.policy, self.name)
        self.index = index = ClusterIndex()
        self._subscriptions = Subscriptions(self.nodes, index)
        metrics.watch(self.nodes.all, table.counts, index, lambda: self.nodes.is_ready)
        ledger = Ledger()
        snapshots = Snapshots(index, ledger, roles_are_fixed=config.roles == "fixed")
        self.nodes.watch(lambda: snapshots.keep([node.info.name for node in self.nodes.all()]))
        self.nodes.watch_status(lambda node: snapshots.heartbeat(node.info, node.status, clock()))
        self.nodes.watch_status(lambda node: admission.grant())
        policy = policy or POLICIES[config.policy]
        self._tracing = tracing or open_tracing(config.tracing, SERVICE, self.name)
        context = RouterContext(
            config, self.nodes, table, policy, ledger, snapshots, metrics, index, clock, tracing=self._tracing
        )
        self.context = context
        service = CompletionService(tokens, context, admission)
        self._parsing = WorkerPool(settings, config.parse_processes, config.max_parsing)
        parser = RequestParser(
            BodyParser(name, tokens), self._parsing, lambda: self.nodes.max_model_tokens, config.request_timeout_s
        )
        status = ClusterStatus(
            self.name,
            config.served_model_name,
            self.nodes,
            table,
            admission,
            metrics,
            index,
            context.decisions,
            clock,
        )
        self._drains = Drains(self.nodes, table, snapshots, metrics, clock)
        roles = RoleSwitch(self.nodes)
        self._role_changes = RoleChanges(
            self.nodes, roles, metrics, window_s=config.role_window_s, heartbeat_s=config.heartbeat_s, clock=clock
        )
        self._keys = KeySource(config.api_keys, config.api_keys_file)
        self._clients = Clients(config, self._keys.keys if self._keys.is_on else None, clock)
        stored = StoredResponses(config, clock)
        app = build_app(
            service, parser, status, roles, self._drains, self._clients, config, stored, metrics.http_response
        )
        self._http = HttpServer(app, config, config.shutdown_grace_s, metrics.http_response)
        self._registry = registry_server(self.nodes, config.heartbeat_s, identity, config.control_silence_s)
        self._closed = asyncio.Event()
        self.url = ""
        self.control_address = ""

    async def start(self) -> None:
        """Listens on both ports, and sets `url` and `control_address`; raises ListenError."""
        config = self._config
        control_port = await self._registry.start(config.control_host, config.control_port)
        self.control_address = f"{config.control_host}:{control_port}"
        try:
            port = self._http.start(config.host, config.port)
        except ListenError:
            await self._registry.stop(0)
            raise
        self.url = f"http://{config.host}:{port}"
        self._subscriptions.start()
        self._watching = [
            asyncio.create_task(Liveness(self.nodes, config.heartbeat_s).run()),
            asyncio.create_task(self._keys.watch(self._clients.use)),
        ]
        if config.role_planner:
            self._watching.append(asyncio.create_task(self._role_changes.run()))
        log.info("router at %s, nodes register at %s", self.url, self.control_address)

    async def stop(self) -> None:
        """Stops once requests in flight have ended, at the latest after `shutdown_grace_s`; idempotent."""
        if self._closed.is_set():
            return
        self._http.begin_to_stop()
        await asyncio.wait({self._http.serving}, timeout=self._config.shutdown_grace_s + 5)
        for task in (self._http.serving, *self._watching):
            task.cancel()
        await asyncio.gather(self._http.serving, *self._watching, return_exceptions=True)
        await self._parsing.close()
        await self._registry.stop(0)
        await self._drains.close()
        await self._subscriptions.close()
        await self.nodes.close()
        await asyncio.to_thread(self._tracing.close)
        self._closed.set()

    async def wait_closed(self) -> None:
        """Waits until `stop` has finished."""
        await self._closed.wait()
