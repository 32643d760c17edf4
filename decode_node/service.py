"""The decode role's gRPC service: decodes messages, encodes replies, and reports errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import chain

import grpc.aio

from decode_node.config import DecodeConfig
from decode_node.role import DecodeRole
from headrace.engine.intake import BadRequest
from headrace.tracing import Tracing
from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeCommand, LocalPrefill, Reservation, Start, Tokens, TokensRead, TransferReport
from node_runtime.fetch import Fetches
from node_runtime.router_calls import RouterCalls
from node_runtime.runtime import NodeRuntime
from node_runtime.service import errors_as_status, feed_of, read, router_of, timeout_s, trace_of
from node_runtime.token_feeds import FedCall, TokenFeeds
from node_runtime.tracing import traced

STAGES = {Reservation: "receive", LocalPrefill: "compute", TransferReport: "generate", Tokens: "generate"}
"""Stages in traces, by the reply with which they begin."""


class DecodeService(rpc.DecodeServicer):
    def __init__(self, role: DecodeRole, calls: RouterCalls, feeds: TokenFeeds, tracing: Tracing) -> None:
        self._role = role
        self._tracing = tracing
        self._calls = calls
        self._feeds = feeds

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.DecodeCommand],
        context: grpc.aio.ServicerContext[pb.DecodeCommand, pb.DecodeEvent],
    ) -> AsyncIterator[pb.DecodeEvent]:
        async with self._calls.counted(router_of(context)), errors_as_status(context):
            fed = FedCall(self._feeds, feed_of(context))
            commands = _commands(request_iterator, fed)
            start = await anext(commands, None)
            if not isinstance(start, Start):
                raise BadRequest("the first command must be start")
            run = self._role.run(start, commands, timeout_s(context), fed)
            spans = traced(self._tracing, "decode call", trace_of(context), run, "admission", STAGES)
            async with aclosing(spans) as replies:
                async for reply in replies:
                    if isinstance(reply, Tokens) and fed.put(reply):
                        continue
                    fed.num_events += 1
                    yield codecs.encode_one_of(reply, pb.DecodeEvent(fed_before=fed.num_fed))

    async def Feed(
        self, request: pb.FeedRequest, context: grpc.aio.ServicerContext[pb.FeedRequest, pb.FedTokens]
    ) -> AsyncIterator[pb.FedTokens]:
        with self._feeds.opened(request.feed) as feed:
            async with aclosing(feed.batches()) as batches:
                async for batch in batches:
                    calls, events_before = zip(*batch, strict=True)
                    yield pb.FedTokens(
                        calls=calls,
                        events_before=events_before,
                        counts=map(len, batch.values()),
                        token_ids=chain.from_iterable(batch.values()),
                    )


async def _commands(messages: AsyncIterator[pb.DecodeCommand], fed: FedCall) -> AsyncIterator[DecodeCommand]:
    """A call's commands; what its router says of the feed is between the two alone."""
    async for message in messages:
        command = read(codecs.decode_one_of, message)
        if isinstance(command, TokensRead):
            fed.read(command.num_tokens)
        else:
            yield command


def serve_decode(config: DecodeConfig, runtime: NodeRuntime, fetches: Fetches, server: grpc.aio.Server) -> DecodeRole:
    """Adds the service to a node's gRPC server; returns the role."""
    role = DecodeRole(runtime, config, fetches)
    rpc.add_DecodeServicer_to_server(DecodeService(role, runtime.calls, runtime.feeds, runtime.tracing), server)
    return role
