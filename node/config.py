"""Settings of a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decode_node.config import DecodeConfig

NODE_FLAGS = {
    "--model": "model_path",
    "--name": "name",
    "--role": "role",
    "--router": "router_addresses",
    "--host": "host",
    "--port": "port",
    "--device": "engine.device",
    "--threads": "engine.threads",
    "--cache-bytes": "engine.cache_bytes",
    "--load-format": "engine.load_format",
    "--tls-ca": "tls.ca",
    "--tls-cert": "tls.cert",
    "--tls-key": "tls.key",
    "--tls-server-name": "tls.server_name",
}
"""Flags of `headrace node`: flag -> the field that it sets."""


@dataclass(frozen=True)
class NodeConfig(DecodeConfig):
    """Settings of a node: those of `RuntimeConfig` and of both roles, because any node may do the work of either.

    role  the work for which routers use the node at its start: prefill, decode, or both; `headrace role` changes it
    """

    role: Literal["prefill", "decode", "both"] = "both"
