"""The work of a process of a test (see process.py).

Says one JSON line when it serves, then runs until SIGTERM, or until it stops by itself. A config in full, not a command
line, so that tests can set anything.
"""

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any


def server_for(config: Any) -> Any:
    match type(config).__name__:
        case "RouterConfig":
            from router.server import RouterServer

            return RouterServer(config)
        case "NodeConfig":
            from node.server import node_server

            return node_server(config)
        case "FaultyNode":
            from tests.support.cluster.fault_node import FaultyServer

            return FaultyServer(config)
        case "BrokenNode":
            from tests.support.cluster.broken_node import broken_node

            return broken_node(config)
        case "TroubledNode":
            from tests.support.cluster.troubled_node import TroubledServer

            return TroubledServer(config)
        case "NodeThatSays":
            from tests.support.cluster.device_cluster import node_that_says

            return node_that_says(config)
        case other:
            raise TypeError(f"no process for a {other}")


def said(server: Any) -> dict[str, str]:
    if hasattr(server, "url"):
        return {"url": server.url, "control_address": server.control_address}
    return {"address": server.info.address}


async def main(config: Any, say: Callable[[str], None]) -> None:
    server = server_for(config)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    say(json.dumps(said(server)))
    waits = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(server.wait_closed())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await server.stop()
