"""A node counts the open calls of each router."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.client import GrpcNodeClient
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import PrefillRequest, Start
from headrace.wire.server import ControlServer
from node_runtime.router_calls import RouterCalls
from node_runtime.service import router_of
from tests.support.patience import PATIENCE_S

REQUEST = Request("r", TokenArray.of((1,)), 1, Sampling(max_tokens=1, seed=0))


class BusyNode(rpc.PrefillServicer, rpc.DecodeServicer):
    """Never answers."""

    def __init__(self) -> None:
        self.calls = RouterCalls()

    async def Run(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async with self.calls.counted(router_of(context)):
            await asyncio.Event().wait()
        yield

    async def counts(self, wanted: dict[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.calls.counts() != wanted:
                await asyncio.sleep(0.005)


async def test_calls_are_counted_by_router_while_they_are_open() -> None:
    node = BusyNode()

    def add(server: grpc.aio.Server) -> None:
        rpc.add_PrefillServicer_to_server(node, server)
        rpc.add_DecodeServicer_to_server(node, server)

    server = ControlServer(["Prefill", "Decode"], add)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    first, second = (GrpcNodeClient("n0", address, router=name) for name in ("first", "second"))
    try:
        async with (
            first.decode(Start(REQUEST), timeout_s=PATIENCE_S),
            second.decode(Start(REQUEST), timeout_s=PATIENCE_S),
            grpc.aio.insecure_channel(address) as channel,
        ):
            async with first.prefill(PrefillRequest(REQUEST), timeout_s=PATIENCE_S):
                nameless = rpc.PrefillStub(channel).Run(pb.PrefillRequest())
                await node.counts({"first": 2, "second": 1})
                nameless.cancel()
            await node.counts({"first": 1, "second": 1})
        await node.counts({})
    finally:
        await first.close()
        await second.close()
        await server.stop(0)
