"""A model folder without weights, a router over fake nodes, and clients to it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from router.config import RouterConfig
from router.routing.plan import Policy
from router.server import RouterServer
from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, node_status
from tests.support.router.model_folder import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "little")


@pytest.fixture(scope="session")
def tokens(model_folder: Path) -> ModelTokens:
    return ModelTokens(model_folder)


@dataclass
class Running:
    """A router that serves over loopback, its fake nodes, and an HTTP client."""

    server: RouterServer
    cluster: FakeCluster
    http: httpx.AsyncClient

    def register(self, *names: str) -> None:
        for info in self.cluster.infos():
            if not names or info.name in names:
                self.server.nodes.register(info, node_status())


StartRouter = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_router(model_folder: Path) -> AsyncIterator[StartRouter]:
    """`await start_router(cluster, max_queue=3)`: every node of the cluster is registered."""
    async with AsyncExitStack() as stack:

        async def start(
            cluster: FakeCluster,
            register: bool = True,
            policy: Policy | None = None,
            clock: Callable[[], float] = time.monotonic,
            **settings: object,
        ) -> Running:
            # Fake nodes send no heartbeats: they live for 3 x 60 s.
            defaults = {
                "port": 0,
                "control_port": 0,
                "heartbeat_s": 60.0,
                "shutdown_grace_s": 2.0,
                "roles": "fixed",  # so that the shortest prompt is handed over
            }
            server = RouterServer(
                RouterConfig(model_folder, **(defaults | settings)),
                connect_to=cluster.connect,
                policy=policy,
                clock=clock,
            )
            await server.start()
            stack.push_async_callback(server.stop)
            # verify=False: no https here, and httpx would take 30 ms to load the world's authorities.
            client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, verify=False)
            http = await stack.enter_async_context(client)
            running = Running(server, cluster, http)
            if register:
                running.register()
            return running

        yield start
