"""A gRPC server says once that it cannot listen, and ends the calls of a client that is gone without a word."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.server import ControlServer
from tests.support.patience import PATIENCE_S

TWO_ON_ONE_PORT = """
import asyncio
import sys
from headrace.wire.server import ControlServer, ListenError

async def main():
    first, second, third = (ControlServer(["Registry"], lambda server: None) for _ in range(3))
    port = await first.start("127.0.0.1", 0)
    try:
        await second.start("127.0.0.1", port)
    except ListenError as error:
        print(error)
    for server in (first, second, third):
        await server.stop(0)
    return second, third

sys.kept = asyncio.run(main())  # to the end: a traceback, too, keeps what failed
"""

ONE_PREFILL = """
import asyncio
import sys
from headrace.wire.client import GrpcNodeClient
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.messages import (PrefillRequest)

async def main():
    request = PrefillRequest(Request("r", TokenArray.of([1]), 1, Sampling(1, 0)))
    async for _ in GrpcNodeClient("p0", sys.argv[1]).prefill(request, timeout_s=60):
        pass

asyncio.run(main())
"""


def test_a_taken_port_is_one_error_and_the_process_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_ON_ONE_PORT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert "is the port taken?" in done.stdout
    assert "excepthook" not in done.stderr


class EndlessPrefill(rpc.PrefillServicer):
    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Run(self, request: object, context: object) -> AsyncIterator[pb.PrefillEvent]:
        self.began.set()
        try:
            await asyncio.Event().wait()
            yield pb.PrefillEvent()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
async def endless() -> AsyncIterator[tuple[EndlessPrefill, str]]:
    prefill = EndlessPrefill()
    server = ControlServer(["Prefill"], lambda server: rpc.add_PrefillServicer_to_server(prefill, server))
    port = await server.start("127.0.0.1", 0)
    yield prefill, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_the_call_of_a_client_that_stopped_is_cancelled_long_before_its_deadline(
    endless: tuple[EndlessPrefill, str],
) -> None:
    """As behind a cut network: its kernel says nothing of it, only its answers to our pings stay away."""
    prefill, address = endless
    client = subprocess.Popen([sys.executable, "-c", ONE_PREFILL, address])
    try:
        await asyncio.wait_for(prefill.began.wait(), 60)
        client.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(prefill.cancelled.wait(), 20)
    finally:
        client.kill()
        client.wait(20)
