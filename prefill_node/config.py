"""What a prefill node is told at start."""

from __future__ import annotations

from dataclasses import dataclass

from node.config import NodeConfig


@dataclass(frozen=True)
class PrefillNodeConfig(NodeConfig):
    """A prefill node has no settings of its own yet; see `NodeConfig`."""
