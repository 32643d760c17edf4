"""The base of the Ray actors that run prefill and decode nodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import ray
import ray.util

from headrace.wire.messages import NodeInfo
from node_runtime.config import NodeConfig
from node_runtime.process import forget_start_up
from node_runtime.server import NodeServer

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=NodeConfig)
RESTART_PAUSE_S = 1.0


class NodeActor:
    """Runs a node in the actor's event loop. The constructor returns once the node serves, or raises like `start`.

    A crash of the engine ends the process, and so does a restart that fails. Ray then starts the actor again, and the
    node comes back with another incarnation.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, make_node: Callable[[Config], NodeServer], config: Config, host: str | None
    ) -> None:
        """`host` None: the address of the host on which Ray runs the actor."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        device = assigned_device(config.engine.device, ray.get_gpu_ids(), os.environ)
        host = host or ray.util.get_node_ip_address()
        self._name = config.name
        try:
            self._node = make_node(replace(config, host=host, engine=replace(config.engine, device=device)))
            await self._node.start()
            forget_start_up()
        except Exception:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                await _exit_to_restart(f"{self._name} did not start again")
            raise
        self._watch = asyncio.create_task(self._exit_when_crashed())

    def __repr__(self) -> str:
        return self._name  # the prefix of this actor's lines in the supervisor's log

    async def info(self) -> NodeInfo:
        """Returns the node's registration. Ray delivers the call once the node serves."""
        return self._node.info

    async def stop(self) -> None:
        """Leaves the router and stops the node; the process stays until Ray kills it."""
        self._watch.cancel()
        await self._node.stop()

    async def _exit_when_crashed(self) -> None:
        try:
            await self._node.wait_closed()
        except Exception:
            await _exit_to_restart(f"{self._name} crashed")


def assigned_device(device: str, gpu_ids: Sequence[int | str], environ: Mapping[str, str]) -> str:
    """Returns the device to use: for `cuda`, Ray's GPU for this actor by its index among the visible ones.

    All GPUs stay visible (the supervisor asks Ray for that): CUDA IPC to a GPU that a process cannot see fails.
    """
    if device != "cuda" or not gpu_ids:
        return device
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    index = visible.split(",").index(str(gpu_ids[0])) if visible else int(gpu_ids[0])
    return f"cuda:{index}"


async def _exit_to_restart(what: str) -> None:
    log.exception("%s: this process ends, Ray starts another", what)
    await asyncio.sleep(RESTART_PAUSE_S)  # a permanent fault must not become a busy loop
    os._exit(1)
