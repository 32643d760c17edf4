"""The decode role's gRPC service: messages in, messages out, errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import grpc.aio

from decode_node.config import DecodeNodeConfig
from decode_node.decode import Decode
from node.chassis import Chassis, Node
from node.service import NodeService, answers, timeout_s
from wire import codecs
from wire.generated import headrace_pb2 as pb
from wire.generated import headrace_pb2_grpc as rpc
from wire.messages import DecodeCommand, Role, Start


class DecodeService(rpc.DecodeServicer):
    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeEvent],
    ) -> AsyncIterator[pb.DecodeEvent]:
        commands = _commands(request_iterator)
        start = await anext(commands, None)
        if not isinstance(start, Start):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command must be start")
        events = self._decode.run(start, commands, timeout_s(context))
        async with aclosing(answers(events, context)) as answered:
            async for event in answered:
                yield codecs.encode_decode_event(event)


async def _commands(messages: AsyncIterator[pb.DecodeCommand]) -> AsyncIterator[DecodeCommand]:
    async for message in messages:
        yield codecs.decode_decode_command(message)


def decode_node(config: DecodeNodeConfig) -> Node:
    """A decode node, not yet started."""

    def serve(chassis: Chassis, server: grpc.aio.Server, node: Node) -> Decode:
        decode = Decode(chassis, config)
        rpc.add_DecodeServicer_to_server(DecodeService(decode), server)
        rpc.add_NodeServicer_to_server(NodeService(lambda: node.info, node.status, node.cache_feed.updates), server)
        return decode

    return Node(config, Role.DECODE, "Decode", serve)
