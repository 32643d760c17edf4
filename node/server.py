"""A node with both roles: one engine, one cache and one transport, and the gRPC service of each role over them."""

from __future__ import annotations

from functools import partial

from decode_node.service import serve_decode
from headrace.engine.build import build_engine
from headrace.wire.node_messages import Role
from node.config import NodeConfig
from node_runtime.server import EngineBuilder, NodeServer
from prefill_node.service import serve_prefill


def node_server(config: NodeConfig, *, host_id: str | None = None, build: EngineBuilder = build_engine) -> NodeServer:
    """Returns a node that has not been started, whose engine `build` builds.

    host_id   of what ends together with it; None: the machine
    """
    return NodeServer(
        config,
        Role(config.role),
        {"Prefill": serve_prefill, "Decode": partial(serve_decode, config)},
        host_id,
        build,
    )
