"""A node as a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import ray
import ray.util

from headrace.actor import ServerActor
from headrace.wire.node_messages import NodeInfo
from node.config import NodeConfig


class NodeActor(ServerActor):
    """Runs a node; a restarted one comes back with another incarnation."""

    async def __init__(self, config: NodeConfig, host: str | None, niceness: int) -> None:  # type: ignore[misc]
        """`host` None: the address of the host on which Ray runs the actor."""
        # Here: the supervisor, which imports this class to describe it to Ray, needs neither torch nor UCX.
        from node.server import node_server
        from node_runtime.process import START_ERRORS

        device = assigned_device(config.engine.device, ray.get_gpu_ids(), os.environ)
        here = replace(
            config, host=host or ray.util.get_node_ip_address(), engine=replace(config.engine, device=device)
        )
        raylet = ray.get_runtime_context().get_node_id()  # its workers end with it
        await super().__init__(config.name, niceness, partial(node_server, here, host_id=raylet), START_ERRORS)  # type: ignore[misc]

    async def info(self) -> NodeInfo:
        """Returns the node's registration. Ray delivers the call once the node serves. Raises one of START_ERRORS."""
        return self.serving().info


def assigned_device(device: str, gpu_ids: Sequence[int | str], environ: Mapping[str, str]) -> str:
    """Returns the device to use: for `cuda`, Ray's GPU for this actor by its index among the visible ones.

    All GPUs stay visible (the supervisor asks Ray for that): CUDA IPC to a GPU that a process cannot see fails.
    """
    if device != "cuda" or not gpu_ids:
        return device
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    index = visible.split(",").index(str(gpu_ids[0])) if visible else int(gpu_ids[0])
    return f"cuda:{index}"
