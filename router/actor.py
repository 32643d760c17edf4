"""The router as a Ray actor."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.actor import ServerActor
from router.config import RouterConfig


@dataclass(frozen=True)
class RouterInfo:
    """Addresses of a started router: `url` for clients, `control_address` for nodes."""

    url: str
    control_address: str
    pid: int


class RouterActor(ServerActor):
    """Runs a router; see `ServerActor`."""

    async def __init__(self, name: str, config: RouterConfig, niceness: int) -> None:  # type: ignore[misc]
        from router.server import START_ERRORS, RouterServer  # here: the supervisor needs no HTTP server

        await super().__init__(name, niceness, lambda: RouterServer(config), START_ERRORS)

    async def info(self) -> RouterInfo:
        """Returns the addresses; Ray delivers the call once the router listens. Raises one of START_ERRORS."""
        server = self.serving()
        return RouterInfo(server.url, server.control_address, os.getpid())
