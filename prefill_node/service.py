"""The prefill role's gRPC service: messages in, messages out, errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc.aio

from headrace.wire import codecs
from headrace.wire.client import GrpcFetchClient
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import PrefillRequest, Role
from node_runtime.runtime import NodeRuntime
from node_runtime.server import NodeServer
from node_runtime.service import errors_as_status, read, timeout_s
from prefill_node.config import PrefillNodeConfig
from prefill_node.role import Prefill


class PrefillService(rpc.PrefillServicer):
    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=PrefillRequest), request)
            async with aclosing(self._prefill.run(wanted, timeout_s(context))) as events:
                async for event in events:
                    yield codecs.encode_one_of(event, pb.PrefillEvent())


def prefill_node(config: PrefillNodeConfig) -> NodeServer:
    """A prefill node, not yet started."""

    def serve(runtime: NodeRuntime, server: grpc.aio.Server) -> Prefill:
        prefill = Prefill(runtime, config, lambda fetch_source: GrpcFetchClient(fetch_source, runtime.identity))
        rpc.add_PrefillServicer_to_server(PrefillService(prefill), server)
        return prefill

    return NodeServer(config, Role.PREFILL, "Prefill", serve)
