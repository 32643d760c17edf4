"""gRPC clients of nodes and of the router's registry: dataclasses in and out, `NodeError`s for failures.

Every call carries a deadline in seconds from now, except the endless stream of cache updates: keepalive pings detect
that its node is gone. Leaving a call's `async with` block, or cancelling the task inside it, cancels the call, and the
node releases what the call held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from headrace.tracing import current
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.cache_updates import CacheUpdate, decode_cache_update
from headrace.wire.call_status import node_error
from headrace.wire.connection_options import CONTROL_SILENCE_S, channel_options
from headrace.wire.decode_call import GrpcDecodeCall, RouterFeed
from headrace.wire.errors import RequestRefused
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.node_messages import NodeInfo, NodeStatus, RegisterReply, Role, SwitchRoleReply, SwitchRoleRequest
from headrace.wire.rounds import Rounds
from headrace.wire.tls import Identity

Reply = TypeVar("Reply", bound=Message)
Event = TypeVar("Event")
Event_co = TypeVar("Event_co", covariant=True)

ROUTER_METADATA = "headrace-router"
"""Key of the metadata with which a router's calls name it."""


def open_channel(address: str, identity: Identity | None, silence_s: float) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port), with TLS if this process has an identity. Connects on first use."""
    options = channel_options(silence_s)
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address, identity.channel_credentials(), options=(*options, *identity.channel_options())
    )


class StreamCall(Protocol[Event_co]):
    """A call that a node answers with a stream of events: an async context manager and an async iterator."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> AsyncIterator[Event_co]: ...


class DecodeCall(StreamCall[m.DecodeEvent], Protocol):
    """One request on a decode node: commands in, events out."""

    def take_with(self, take: Callable[[m.Tokens], None], may_take: Callable[[], bool]) -> None: ...
    async def send(self, command: m.DecodeCommand) -> None: ...
    async def abandon(self) -> bool: ...


class NodeClient(Protocol):
    """The router's view of a node; tests pass a fake."""

    def prefill(self, request: m.PrefillRequest, *, timeout_s: float) -> StreamCall[m.PrefillEvent]: ...
    def decode(self, start: m.Start, *, timeout_s: float) -> DecodeCall: ...
    def cache_updates(self) -> StreamCall[CacheUpdate]: ...
    async def describe(self, *, timeout_s: float) -> tuple[NodeInfo, NodeStatus]: ...
    async def switch_role(self, role: Role, *, timeout_s: float) -> int: ...
    async def stop(self, *, timeout_s: float) -> None: ...
    async def close(self) -> None: ...


class FetchClient(Protocol):
    """A node's client for another one that it fetches from; tests pass a fake."""

    async def fetch(self, request: m.FetchRequest, *, timeout_s: float) -> m.FetchReply:
        """Returns when the source has sent everything; raises NodeError. Cancelling it ends the source's part, too."""
        ...

    async def close(self, grace_s: float | None = None) -> None:
        """Closes the connection. Calls in progress get `grace_s` seconds to end, then they are cancelled."""
        ...


class GrpcNodeClient:
    """A `NodeClient` over one gRPC channel to `address` (host:port); `name` appears in its errors. Its calls carry the
    trace context in which they are made.

    router     the name under which the node counts the calls; empty: it counts them nowhere
    silence_s  how long the node may leave a ping unanswered
    rounds     in which tokens of its feed are passed on, shared with other nodes; None: its own
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity | None = None,
        *,
        router: str = "",
        silence_s: float = CONTROL_SILENCE_S,
        rounds: Rounds | None = None,
    ) -> None:
        self._name = name
        self._metadata = ((ROUTER_METADATA, router),) if router else ()
        self._channel = open_channel(address, identity, silence_s)
        self._prefill = rpc.PrefillStub(self._channel)
        self._decode = rpc.DecodeStub(self._channel)
        self._node = rpc.NodeStub(self._channel)
        self._feed = RouterFeed(self._decode.Feed, rounds or Rounds())

    def prefill(self, request: m.PrefillRequest, *, timeout_s: float) -> StreamCall[m.PrefillEvent]:
        """Starts a prefill call."""
        message = codecs.encode(request, pb.PrefillRequest())
        call = self._prefill.Run(message, timeout=timeout_s, metadata=(*self._metadata, *current.get()))
        return _GrpcStream(self._name, call, codecs.decode_one_of)

    def decode(self, start: m.Start, *, timeout_s: float) -> DecodeCall:
        """Opens a decode call; entering it sends `start`."""
        inbox = self._feed.join()
        metadata = (*self._metadata, *inbox.metadata, *current.get())
        call = self._decode.Run(None, timeout=timeout_s, metadata=metadata)
        return GrpcDecodeCall(self._name, call, start, inbox)

    def cache_updates(self) -> StreamCall[CacheUpdate]:
        """Subscribes to the node's cache: a snapshot, then its changes, without end."""
        return _GrpcStream(self._name, self._node.CacheUpdates(pb.CacheUpdatesRequest()), decode_cache_update)

    async def describe(self, *, timeout_s: float) -> tuple[NodeInfo, NodeStatus]:
        """Asks the node for its registration and status. Raises NodeError."""
        try:
            reply = await self._node.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error
        return codecs.decode(reply.info, NodeInfo), codecs.decode(reply.status, NodeStatus)

    async def switch_role(self, role: Role, *, timeout_s: float) -> int:
        """Switches the node's role; returns how often that was done since the node's start. Raises NodeError."""
        request = codecs.encode(SwitchRoleRequest(role), pb.SwitchRoleRequest())
        try:
            reply = await self._node.SwitchRole(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error
        return codecs.decode(reply, SwitchRoleReply).role_switches

    async def stop(self, *, timeout_s: float) -> None:
        """Has the node end as by SIGTERM; returns when it has taken the order. Raises NodeError."""
        try:
            await self._node.Stop(pb.StopRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error

    async def close(self) -> None:
        await self._feed.close()
        await self._channel.close(None)


class _GrpcStream(Generic[Reply, Event]):
    """A `StreamCall` over gRPC; `decode` converts a message to an event."""

    def __init__(self, node: str, call: grpc.aio.UnaryStreamCall[Any, Reply], decode: Callable[[Reply], Event]) -> None:
        self._node = node
        self._call = call
        self._decode = decode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for message in self._call:
                yield self._decode(message)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._node, error.code(), error.details()) from error


class GrpcFetchClient:
    """A `FetchClient` over one gRPC channel."""

    def __init__(
        self, fetch_source: m.FetchSource, identity: Identity | None = None, *, silence_s: float = CONTROL_SILENCE_S
    ) -> None:
        self._name = fetch_source.node
        self._channel = open_channel(fetch_source.address, identity, silence_s)
        self._node = rpc.NodeStub(self._channel)

    async def fetch(self, request: m.FetchRequest, *, timeout_s: float) -> m.FetchReply:
        """Raises CheckpointGone, RequestRefused (the layouts differ), TransferBroken, NodeLost, DeadlineExceeded."""
        message = codecs.encode(request, pb.FetchRequest())
        try:
            reply = await self._node.Fetch(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error
        try:
            return codecs.decode(reply, m.FetchReply)
        except ValueError as error:
            raise RequestRefused(self._name, f"its reply cannot be read, do both run one version? {error}") from error

    async def close(self, grace_s: float | None = None) -> None:
        await self._channel.close(grace_s)


class RegistryClient:
    """A node's client for the router's registry."""

    def __init__(self, address: str, identity: Identity | None = None, *, silence_s: float = CONTROL_SILENCE_S) -> None:
        self._address = address
        self._channel = open_channel(address, identity, silence_s)
        self._registry = rpc.RegistryStub(self._channel)

    async def register(self, info: NodeInfo, status: NodeStatus, *, timeout_s: float) -> RegisterReply:
        """Registers the node, or renews its registration with a new status. Raises NodeError."""
        message = pb.RegisterRequest()
        codecs.encode(info, message.info)
        codecs.encode(status, message.status)
        try:
            reply = await self._registry.Register(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(f"router {self._address}", error.code(), error.details()) from error
        return codecs.decode(reply, RegisterReply)

    async def leave(self, name: str, incarnation: int, *, timeout_s: float) -> None:
        """Reports that the node stops now. Raises NodeError."""
        try:
            await self._registry.Leave(pb.LeaveRequest(name=name, incarnation=incarnation), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(f"router {self._address}", error.code(), error.details()) from error

    async def close(self) -> None:
        await self._channel.close(None)
