"""The router as a Ray actor."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

import ray

from router.config import RouterConfig
from router.server import RouterServer

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0


@dataclass(frozen=True)
class RouterInfo:
    """Addresses of a started router: `url` for clients, `control_address` for nodes."""

    url: str
    control_address: str
    pid: int


class RouterActor:
    """Runs a router in the actor's event loop. Made once the router listens; raises the errors of its start."""

    async def __init__(self, config: RouterConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._server = RouterServer(config)
        try:
            await self._server.start()
        except Exception:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                log.exception("the router did not start again: this process ends, Ray starts another")
                await asyncio.sleep(RESTART_PAUSE_S)
                os._exit(1)  # raising would end the actor for good
            raise

    def __repr__(self) -> str:
        return "router"  # the prefix of this actor's lines in the supervisor's log

    async def info(self) -> RouterInfo:
        """Returns the addresses; Ray delivers the call once the router listens."""
        return RouterInfo(self._server.url, self._server.control_address, os.getpid())

    async def stop(self) -> None:
        """Stops listening and gives requests in flight the grace to end; Ray kills the process afterwards."""
        await self._server.stop()
