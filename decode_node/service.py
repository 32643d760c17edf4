"""The decode role's gRPC service: decodes messages, encodes replies, and reports errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from decode_node.config import DecodeConfig
from decode_node.role import DecodeRole
from headrace.engine.intake import BadRequest
from headrace.tracing import Tracing
from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeCommand, LocalPrefill, Reservation, Start, Tokens, TransferReport
from node_runtime.fetch import Fetches
from node_runtime.router_calls import RouterCalls
from node_runtime.runtime import NodeRuntime
from node_runtime.service import errors_as_status, read, router_of, timeout_s, trace_of
from node_runtime.tracing import traced

STAGES = {Reservation: "receive", LocalPrefill: "compute", TransferReport: "generate", Tokens: "generate"}
"""Stages in traces, by the reply with which they begin."""


class DecodeService(rpc.DecodeServicer):
    def __init__(self, role: DecodeRole, calls: RouterCalls, tracing: Tracing) -> None:
        self._role = role
        self._tracing = tracing
        self._calls = calls

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeEvent],
    ) -> AsyncIterator[pb.DecodeEvent]:
        async with self._calls.counted(router_of(context)), errors_as_status(context):
            commands = _commands(request_iterator)
            start = await anext(commands, None)
            if not isinstance(start, Start):
                raise BadRequest("the first command must be start")
            run = self._role.run(start, commands, timeout_s(context))
            spans = traced(self._tracing, "decode call", trace_of(context), run, "admission", STAGES)
            async with aclosing(spans) as replies:
                async for reply in replies:
                    yield codecs.encode_one_of(reply, pb.DecodeEvent())


async def _commands(messages: AsyncIterator[pb.DecodeCommand]) -> AsyncIterator[DecodeCommand]:
    async for message in messages:
        yield read(codecs.decode_one_of, message)


def serve_decode(config: DecodeConfig, runtime: NodeRuntime, fetches: Fetches, server: grpc.aio.Server) -> DecodeRole:
    """Adds the service to a node's gRPC server; returns the role."""
    role = DecodeRole(runtime, config, fetches)
    rpc.add_DecodeServicer_to_server(DecodeService(role, runtime.calls, runtime.tracing), server)
    return role
