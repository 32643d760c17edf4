"""The prefill role's gRPC service: decodes messages, encodes replies, and reports errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc.aio

from headrace.tracing import Tracing
from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import ComputeStarted, FirstToken, PrefillRequest
from node_runtime.fetch import Fetches
from node_runtime.router_calls import RouterCalls
from node_runtime.runtime import NodeRuntime
from node_runtime.service import errors_as_status, read, router_of, timeout_s, trace_of
from node_runtime.tracing import traced
from prefill_node.role import PrefillRole

STAGES = {ComputeStarted: "compute", FirstToken: "send"}  # in traces, by the reply with which they begin


class PrefillService(rpc.PrefillServicer):
    def __init__(self, role: PrefillRole, calls: RouterCalls, tracing: Tracing) -> None:
        self._role = role
        self._tracing = tracing
        self._calls = calls

    async def Run(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with self._calls.counted(router_of(context)), errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=PrefillRequest), request)
            run = self._role.run(wanted, timeout_s(context))
            spans = traced(self._tracing, "prefill call", trace_of(context), run, "line", STAGES)
            async with aclosing(spans) as replies:
                async for reply in replies:
                    yield codecs.encode_one_of(reply, pb.PrefillEvent())


def serve_prefill(runtime: NodeRuntime, fetches: Fetches, server: grpc.aio.Server) -> PrefillRole:
    """Adds the service to a node's gRPC server; returns the role."""
    role = PrefillRole(runtime, fetches)
    rpc.add_PrefillServicer_to_server(PrefillService(role, runtime.calls, runtime.tracing), server)
    return role
