"""The prefill node as a Ray actor."""

from __future__ import annotations

from node_runtime.actor import NodeActor
from prefill_node.config import PrefillNodeConfig
from prefill_node.service import prefill_node


class PrefillActor(NodeActor):
    """One prefill node; see `NodeActor`."""

    async def __init__(self, config: PrefillNodeConfig, host: str | None, niceness: int) -> None:  # type: ignore[misc]
        await super().__init__(prefill_node, config, host, niceness)  # type: ignore[misc]
