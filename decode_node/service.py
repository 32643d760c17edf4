"""The decode role's gRPC service: messages in, messages out, errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc.aio

from decode_node.config import DecodeNodeConfig
from decode_node.fetch_server import FetchServer
from decode_node.role import Decode
from headrace.engine.requests import BadRequest
from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeCommand, FetchRequest, Role, Start
from node_runtime.runtime import NodeRuntime
from node_runtime.server import NodeServer
from node_runtime.service import errors_as_status, read, timeout_s


class DecodeService(rpc.DecodeServicer):
    def __init__(self, decode: Decode, fetch_server: FetchServer) -> None:
        self._decode = decode
        self._fetch_server = fetch_server

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeEvent],
    ) -> AsyncIterator[pb.DecodeEvent]:
        async with errors_as_status(context):
            commands = _commands(request_iterator)
            start = await anext(commands, None)
            if not isinstance(start, Start):
                raise BadRequest("the first command must be start")
            async with aclosing(self._decode.run(start, commands, timeout_s(context))) as events:
                async for event in events:
                    yield codecs.encode_one_of(event, pb.DecodeEvent())

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchReply]
    ) -> pb.FetchReply:
        reply = pb.FetchReply()
        async with errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=FetchRequest), request)
            codecs.encode(await self._fetch_server.run(wanted, timeout_s(context)), reply)
        return reply


async def _commands(messages: AsyncIterator[pb.DecodeCommand]) -> AsyncIterator[DecodeCommand]:
    async for message in messages:
        yield read(codecs.decode_one_of, message)


class _DecodeRole:
    """What the runtime asks of this role."""

    def __init__(self, decode: Decode, fetch_server: FetchServer) -> None:
        self._decode = decode
        self._fetch_server = fetch_server

    def counters(self) -> dict[str, float]:
        return {**self._decode.counters(), **self._fetch_server.counters()}

    async def close(self) -> None:
        """Nothing: its calls have ended with the server, its sessions end with the transport."""


def decode_node(config: DecodeNodeConfig) -> NodeServer:
    """A decode node, not yet started."""

    def serve(runtime: NodeRuntime, server: grpc.aio.Server) -> _DecodeRole:
        decode, fetch_server = Decode(runtime, config), FetchServer(runtime)
        rpc.add_DecodeServicer_to_server(DecodeService(decode, fetch_server), server)
        return _DecodeRole(decode, fetch_server)

    return NodeServer(config, Role.DECODE, "Decode", serve)
