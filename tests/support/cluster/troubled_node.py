"""A node with one trouble, in a process of its own: a poisonous token, or a slow start. No product code knows of it."""

import asyncio
from dataclasses import dataclass

from headrace.engine.runner import ModelRunner
from headrace.wire.node_messages import NodeInfo
from node.config import NodeConfig
from node.server import node_server


@dataclass(frozen=True)
class TroubledNode:
    """poison         a step with a prompt that begins with this token, twice, raises
    start_after_s  time that its start takes longer, as for a larger model
    """

    config: NodeConfig
    poison: int | None = None
    start_after_s: float = 0.0


class TroubledServer:
    """Starts and stops like the node that it wraps. One a process."""

    def __init__(self, node: TroubledNode) -> None:
        self._start_after_s = node.start_after_s
        if node.poison is not None:
            _poison(node.poison)
        config = node.config
        self._node = node_server(config)

    @property
    def info(self) -> NodeInfo:
        return self._node.info

    async def start(self) -> None:
        await asyncio.sleep(self._start_after_s)
        await self._node.start()

    async def wait_closed(self) -> None:
        await self._node.wait_closed()

    async def stop(self) -> None:
        await self._node.stop()


def _poison(token: int) -> None:
    launch = ModelRunner.launch

    def poisoned(self, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        if any(each.start == 0 and list(each.tokens[:2]) == [token, token] for each in inputs):
            raise RuntimeError("poison")
        return launch(self, inputs, *args, **kwargs)

    ModelRunner.launch = poisoned  # type: ignore[method-assign]
