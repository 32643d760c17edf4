"""The prefill role's gRPC service: decodes messages, encodes replies, and reports errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc.aio

from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import PrefillRequest
from node_runtime.fetch import Fetches
from node_runtime.router_calls import RouterCalls
from node_runtime.runtime import NodeRuntime
from node_runtime.service import errors_as_status, read, router_of, timeout_s
from prefill_node.role import PrefillRole


class PrefillService(rpc.PrefillServicer):
    def __init__(self, role: PrefillRole, calls: RouterCalls) -> None:
        self._role = role
        self._calls = calls

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with self._calls.counted(router_of(context)), errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=PrefillRequest), request)
            async with aclosing(self._role.run(wanted, timeout_s(context))) as replies:
                async for reply in replies:
                    yield codecs.encode_one_of(reply, pb.PrefillEvent())


def serve_prefill(runtime: NodeRuntime, fetches: Fetches, server: grpc.aio.Server) -> PrefillRole:
    """Adds the service to a node's gRPC server; returns the role."""
    role = PrefillRole(runtime, fetches)
    rpc.add_PrefillServicer_to_server(PrefillService(role, runtime.calls), server)
    return role
