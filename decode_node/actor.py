"""The decode node as a Ray actor."""

from __future__ import annotations

from decode_node.config import DecodeNodeConfig
from decode_node.service import decode_node
from node_runtime.actor import NodeActor


class DecodeActor(NodeActor):
    """One decode node; see `NodeActor`."""

    async def __init__(self, config: DecodeNodeConfig, host: str | None, niceness: int) -> None:  # type: ignore[misc]
        await super().__init__(decode_node, config, host, niceness)  # type: ignore[misc]
