"""Parts of the gRPC services of both roles: errors as status codes, reading messages, and the Node service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from headrace.engine.failures import NanLogits, OutOfMemory, StepFailed, UnprovenPrefix
from headrace.engine.intake import BadRequest
from headrace.engine.loop import EngineLost
from headrace.tracing import TraceContext, context_of
from headrace.wire import codecs
from headrace.wire.cache_updates import CacheUpdate, encode_cache_update
from headrace.wire.client import ROUTER_METADATA
from headrace.wire.decode_call import FEED_METADATA
from headrace.wire.errors import CRASH_DETAILS, STOP_DETAILS
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import FetchReply, FetchRequest
from headrace.wire.node_messages import NodeInfo, NodeStatus, Role, SwitchRoleReply, SwitchRoleRequest
from node_runtime.sessions import CheckpointMissing, NoCapacity
from transfer.protocol.errors import LayoutMismatch, TransferError, TransferFailed

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (StepFailed, grpc.StatusCode.INTERNAL),
    (EngineLost, grpc.StatusCode.UNAVAILABLE),
    (OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NanLogits, grpc.StatusCode.OUT_OF_RANGE),
    (UnprovenPrefix, grpc.StatusCode.DATA_LOSS),
    (LayoutMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (TransferFailed, grpc.StatusCode.ABORTED),
    (TransferError, grpc.StatusCode.ABORTED),
    (NoCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CheckpointMissing, grpc.StatusCode.NOT_FOUND),
)

DEFAULT_TIMEOUT_S = 600.0  # for a call without a deadline: nothing may be held for ever


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turns a known error of its block into the call's status.

    gRPC ends the block at the caller's deadline. A call without one ends after DEFAULT_TIMEOUT_S, with
    DEADLINE_EXCEEDED.
    """
    try:
        async with asyncio.timeout(DEFAULT_TIMEOUT_S if context.time_remaining() is None else None) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"the call set no deadline and has not ended within {DEFAULT_TIMEOUT_S:g} s: set one"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
    except tuple(kind for kind, _ in _CODES) as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        prefix = CRASH_DETAILS if isinstance(error, StepFailed) else STOP_DETAILS * isinstance(error, EngineLost)
        await context.abort(code, prefix + str(error))


def read(decode: Callable[[M], T], message: M) -> T:
    """Returns `decode(message)`. Raises BadRequest for a message that this version cannot read."""
    try:
        return decode(message)
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{type(message).__name__} cannot be read: {error}; do both sides run one version?") from error


def timeout_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds until the call's deadline."""
    remaining = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining is None else min(remaining, DEFAULT_TIMEOUT_S)


def router_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The name of the router that makes the call; empty for another caller."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(ROUTER_METADATA, ""))


def feed_of(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[int, int] | None:
    """The feed that a call names in its metadata, and its own number there; None: it has none. Raises BadRequest."""
    name = dict(context.invocation_metadata() or ()).get(FEED_METADATA)
    if name is None:
        return None
    try:
        feed, call = map(int, str(name).split("-"))
    except ValueError:
        raise BadRequest(f"{FEED_METADATA} {name!r}: must be FEED-CALL, two numbers") from None
    return feed, call


def trace_of(context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext:
    """The trace context in which a router makes the call; empty: none."""
    return context_of({key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)})


class Node(Protocol):
    """A node as its Node service presents it; see `NodeServer`."""

    @property
    def info(self) -> NodeInfo: ...
    async def status(self) -> NodeStatus: ...
    def cache_updates(self) -> AsyncGenerator[CacheUpdate, None]: ...
    async def fetch(self, request: FetchRequest, timeout_s: float) -> FetchReply: ...
    def switch_role(self, role: Role) -> int: ...
    def begin_to_stop(self) -> None: ...


class NodeService(rpc.NodeServicer):
    """The Node service: what every node does, whatever its role."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeReply]
    ) -> pb.DescribeReply:
        reply = pb.DescribeReply()
        codecs.encode(self._node.info, reply.info)
        codecs.encode(await self._node.status(), reply.status)
        return reply

    async def CacheUpdates(
        self,
        request: pb.CacheUpdatesRequest,
        context: grpc.aio.ServicerContext[pb.CacheUpdatesRequest, pb.CacheUpdate],
    ) -> AsyncIterator[pb.CacheUpdate]:
        async with aclosing(self._node.cache_updates()) as updates:
            async for update in updates:
                yield encode_cache_update(update)

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchReply]
    ) -> pb.FetchReply:
        reply = pb.FetchReply()
        async with errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=FetchRequest), request)
            codecs.encode(await self._node.fetch(wanted, timeout_s(context)), reply)
        return reply

    async def SwitchRole(
        self,
        request: pb.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchRoleRequest, pb.SwitchRoleReply],
    ) -> pb.SwitchRoleReply:
        async with errors_as_status(context):
            wanted = read(partial(codecs.decode, cls=SwitchRoleRequest), request)
        return codecs.encode(SwitchRoleReply(self._node.switch_role(wanted.role)), pb.SwitchRoleReply())

    async def Stop(
        self, request: pb.StopRequest, context: grpc.aio.ServicerContext[pb.StopRequest, pb.StopReply]
    ) -> pb.StopReply:
        self._node.begin_to_stop()
        return pb.StopReply()


def add_node_service(server: grpc.aio.Server, node: Node) -> None:
    rpc.add_NodeServicer_to_server(NodeService(node), server)
