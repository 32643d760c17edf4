"""gRPC clients of nodes and of the router's registry: dataclasses in and out, `NodeError`s for failures.

Every call carries a deadline in seconds from now, except the endless stream of cache updates: keepalive pings detect
that its node is gone. Leaving a call's `async with` block, or cancelling the task inside it, cancels the call, and the
node releases what the call held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from headrace.tracing import current
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.cache_updates import CacheUpdate, decode_cache_update
from headrace.wire.connection_options import CONTROL_SILENCE_S, channel_options
from headrace.wire.errors import (
    CRASH_DETAILS,
    STOP_DETAILS,
    CheckpointGone,
    DeadlineExceeded,
    NodeBusy,
    NodeCrashed,
    NodeError,
    NodeLost,
    NodeStopped,
    RequestRefused,
    TransferBroken,
)
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.tls import Identity

Reply = TypeVar("Reply", bound=Message)
Event = TypeVar("Event")
Event_co = TypeVar("Event_co", covariant=True)

ROUTER_METADATA = "headrace-router"
"""Key of the metadata with which a router's calls name it."""

_ERRORS: dict[grpc.StatusCode, type[NodeError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: NodeBusy,
    grpc.StatusCode.ABORTED: TransferBroken,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.NOT_FOUND: CheckpointGone,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


STATUS_TIMEOUT_S = 1.0
"""How long to wait for the server's status after a write failed."""

ABANDON_TIMEOUT_S = 1.0
"""How long sending `Abandon` may take: a node that is lost takes nothing, and keeps nothing either."""

_TOO_LARGE = "message larger than max"  # in gRPC's details, whichever side measured it

# gRPC's messages for a connection that was accepted and then closed; they name no cause on the refused side.
_SIGNS_OF_TLS = ("Socket closed", "handshake failed", "Verification Check failed")


def open_channel(address: str, identity: Identity | None, silence_s: float) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port), with TLS if this process has an identity. Connects on first use."""
    options = channel_options(silence_s)
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address, identity.channel_credentials(), options=(*options, *identity.channel_options())
    )


def node_error(node: str, code: grpc.StatusCode, details: str | None) -> NodeError:
    """Returns the `NodeError` for a call's status; an unknown code means that the node is lost."""
    details = details or f"the call is over: {code.name}"
    if _TOO_LARGE in details:  # under the status of a busy node, but every other node would refuse it, too
        return RequestRefused(node, f"{details}; shorten the prompt")
    if "failed to connect" in details and any(sign in details for sign in _SIGNS_OF_TLS):
        details += "; do both sides have tls, with certificates of one authority that name their hosts?"
    if _is_crash(code, details):
        return NodeCrashed(node, details)
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(STOP_DETAILS):
        return NodeStopped(node, details)
    return _ERRORS.get(code, NodeLost)(node, details)


def _is_crash(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and details is not None and details.startswith(CRASH_DETAILS)


class StreamCall(Protocol[Event_co]):
    """A call that a node answers with a stream of events: an async context manager and an async iterator."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> AsyncIterator[Event_co]: ...


class DecodeCall(StreamCall[m.DecodeEvent], Protocol):
    """One request on a decode node: commands in, events out."""

    async def send(self, command: m.DecodeCommand) -> None: ...
    async def abandon(self) -> None: ...


class NodeClient(Protocol):
    """The router's view of a node; tests pass a fake."""

    def prefill(self, request: m.PrefillRequest, *, timeout_s: float) -> StreamCall[m.PrefillEvent]: ...
    def decode(self, start: m.Start, *, timeout_s: float) -> DecodeCall: ...
    def cache_updates(self) -> StreamCall[CacheUpdate]: ...
    async def describe(self, *, timeout_s: float) -> tuple[m.NodeInfo, m.NodeStatus]: ...
    async def switch_role(self, role: m.Role, *, timeout_s: float) -> int: ...
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
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity | None = None,
        *,
        router: str = "",
        silence_s: float = CONTROL_SILENCE_S,
    ) -> None:
        self._name = name
        self._metadata = ((ROUTER_METADATA, router),) if router else ()
        self._channel = open_channel(address, identity, silence_s)
        self._prefill = rpc.PrefillStub(self._channel)
        self._decode = rpc.DecodeStub(self._channel)
        self._node = rpc.NodeStub(self._channel)

    def prefill(self, request: m.PrefillRequest, *, timeout_s: float) -> StreamCall[m.PrefillEvent]:
        """Starts a prefill call."""
        message = codecs.encode(request, pb.PrefillRequest())
        call = self._prefill.Run(message, timeout=timeout_s, metadata=(*self._metadata, *current.get()))
        return _GrpcStream(self._name, call, codecs.decode_one_of)

    def decode(self, start: m.Start, *, timeout_s: float) -> DecodeCall:
        """Opens a decode call; entering it sends `start`."""
        call = self._decode.Run(None, timeout=timeout_s, metadata=(*self._metadata, *current.get()))
        return _GrpcDecodeCall(self._name, call, start)

    def cache_updates(self) -> StreamCall[CacheUpdate]:
        """Subscribes to the node's cache: a snapshot, then its changes, without end."""
        return _GrpcStream(self._name, self._node.CacheUpdates(pb.CacheUpdatesRequest()), decode_cache_update)

    async def describe(self, *, timeout_s: float) -> tuple[m.NodeInfo, m.NodeStatus]:
        """Asks the node for its registration and status. Raises NodeError."""
        try:
            reply = await self._node.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error
        return codecs.decode(reply.info, m.NodeInfo), codecs.decode(reply.status, m.NodeStatus)

    async def switch_role(self, role: m.Role, *, timeout_s: float) -> int:
        """Switches the node's role; returns how often that was done since the node's start. Raises NodeError."""
        request = codecs.encode(m.SwitchRoleRequest(role), pb.SwitchRoleRequest())
        try:
            reply = await self._node.SwitchRole(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error
        return codecs.decode(reply, m.SwitchRoleReply).role_switches

    async def stop(self, *, timeout_s: float) -> None:
        """Has the node end as by SIGTERM; returns when it has taken the order. Raises NodeError."""
        try:
            await self._node.Stop(pb.StopRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self._name, error.code(), error.details()) from error

    async def close(self) -> None:
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


class _GrpcDecodeCall:
    def __init__(
        self,
        node: str,
        call: grpc.aio.StreamStreamCall[pb.DecodeCommand, pb.DecodeEvent],
        start: m.Start,
    ) -> None:
        self._node = node
        self._call = call
        self._start = start
        self._is_over = False
        self._first_status: tuple[grpc.StatusCode, str | None] = (grpc.StatusCode.INTERNAL, None)
        call.add_done_callback(self._ended)

    async def __aenter__(self) -> Self:
        await self.send(self._start)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()

    async def abandon(self) -> None:
        """Announces that the call ends on purpose: a node keeps a resumable request whose call ends without a word.

        Call it before a task that reads the call is cancelled: that cancels the call. Without effect on other requests,
        and on a call that is over.
        """
        if self._start.request.is_resumable and not self._is_over and not self._call.done():
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(ABANDON_TIMEOUT_S):
                    await self._call.write(codecs.encode_one_of(m.Abandon(), pb.DecodeCommand()))

    async def send(self, command: m.DecodeCommand) -> None:
        try:
            await self._call.write(codecs.encode_one_of(command, pb.DecodeCommand()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # the node ended the call, or is lost
            raise await self._why_it_ended() from error

    async def __aiter__(self) -> AsyncIterator[m.DecodeEvent]:
        try:
            async for message in self._call:
                event = codecs.decode_one_of(message)
                self._is_over = isinstance(event, m.DecodeDone | m.HandedOver)
                yield event
        except grpc.aio.AioRpcError as error:
            raise await self._why_it_ended() from error

    async def _why_it_ended(self) -> NodeError:
        """Returns the node's own status as an error.

        A write to a call that has ended makes gRPC (1.85) set the status INTERNAL. The node's status comes soon after
        and replaces it, or it came before; in that case only the call's done callback has seen it.
        """
        give_up_s = time.monotonic() + STATUS_TIMEOUT_S
        status = self._first_status
        while status[0] is grpc.StatusCode.INTERNAL and not _is_crash(*status) and time.monotonic() < give_up_s:
            await asyncio.sleep(0.001)
            status = await self._status()
        return node_error(self._node, *status)

    async def _status(self) -> tuple[grpc.StatusCode, str | None]:
        return await self._call.code(), await self._call.details()

    def _ended(self, _: object) -> None:
        try:
            self._status().send(None)  # available by now: does not wait
        except StopIteration as status:
            self._first_status = status.value


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

    async def register(self, info: m.NodeInfo, status: m.NodeStatus, *, timeout_s: float) -> m.RegisterReply:
        """Registers the node, or renews its registration with a new status. Raises NodeError."""
        message = pb.RegisterRequest()
        codecs.encode(info, message.info)
        codecs.encode(status, message.status)
        try:
            reply = await self._registry.Register(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(f"router {self._address}", error.code(), error.details()) from error
        return codecs.decode(reply, m.RegisterReply)

    async def leave(self, name: str, incarnation: int, *, timeout_s: float) -> None:
        """Reports that the node stops now. Raises NodeError."""
        try:
            await self._registry.Leave(pb.LeaveRequest(name=name, incarnation=incarnation), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(f"router {self._address}", error.code(), error.details()) from error

    async def close(self) -> None:
        await self._channel.close(None)
