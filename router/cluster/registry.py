"""The gRPC service with which nodes register."""

from __future__ import annotations

import logging

import grpc
import grpc.aio

from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.node_messages import NodeInfo, NodeStatus, RegisterReply
from headrace.wire.server import ControlServer
from headrace.wire.tls import Identity
from router.cluster.nodes import NodeTable
from router.errors import RegistrationRefused

log = logging.getLogger(__name__)


class RegistryService(rpc.RegistryServicer):
    """Register and Leave, over a `NodeTable`."""

    def __init__(self, nodes: NodeTable, heartbeat_s: float) -> None:
        self._nodes = nodes
        self._heartbeat_s = heartbeat_s

    async def Register(
        self,
        request: pb.RegisterRequest,
        context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.RegisterReply],
    ) -> pb.RegisterReply:
        info, status = codecs.decode(request.info, NodeInfo), codecs.decode(request.status, NodeStatus)
        try:
            if self._nodes.register(info, status):
                log.info("%s node %s at %s is registered", info.role.value, info.name, info.address)
        except RegistrationRefused as error:
            log.warning("refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        peers = tuple(self._nodes.receivers_of(info.name))
        abandoned = self._nodes.left.among((info.name, info.incarnation), status.orphans)
        return codecs.encode(RegisterReply(self._heartbeat_s, peers, abandoned), pb.RegisterReply())

    async def Leave(
        self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext[pb.LeaveRequest, pb.LeaveReply]
    ) -> pb.LeaveReply:
        log.info("node %s leaves", request.name)
        self._nodes.leave(request.name, request.incarnation)
        return pb.LeaveReply()


def registry_server(nodes: NodeTable, heartbeat_s: float, identity: Identity | None, silence_s: float) -> ControlServer:
    """Returns a server for the registry, not yet started."""
    service = RegistryService(nodes, heartbeat_s)
    return ControlServer(
        ["Registry"],
        lambda server: rpc.add_RegistryServicer_to_server(service, server),
        identity,
        silence_s=silence_s,
    )
