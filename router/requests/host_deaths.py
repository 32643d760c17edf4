"""Hosts that may be dying: one has just lost a node under a request, and its other nodes may follow. Pure."""

from __future__ import annotations

from headrace.wire.node_messages import NodeInfo
from router.cluster.node_id import NodeId

HOST_DEATH_S = 2.0
"""Within so much of one another the nodes of a host that dies end: those of killed raylets within 0.67 s, on two cores
with a load of 10."""


class HostDeaths:
    """The nodes that one request lost, without a word, in the last HOST_DEATH_S, and with which their hosts may die.

    A request that may itself be what ends nodes is given to no node of such a host: whatever that one dies of, it could
    be the host, and the request would be blamed for it. A node that is lost later was asked when it had outlived the
    host's other one: that loss is another.
    """

    def __init__(self) -> None:
        self._lost_s: dict[str, dict[NodeId, float]] = {}  # by host

    def node_lost(self, info: NodeInfo, now_s: float) -> None:
        """A node that does not say where it runs dies alone."""
        if info.host_id:
            self._lost_s.setdefault(info.host_id, {})[info.name, info.incarnation] = now_s

    def node_lives(self, node: NodeId) -> None:
        """Only the connection to it was lost: no host dies of that."""
        for lost_s in self._lost_s.values():
            lost_s.pop(node, None)

    def lost_nodes(self, now_s: float) -> list[NodeId]:
        """The nodes for which hosts may be dying."""
        hosts = self._lost_s.values()
        return [node for lost_s in hosts for node, at_s in lost_s.items() if now_s - at_s < HOST_DEATH_S]

    def may_include(self, info: NodeInfo, now_s: float) -> bool:
        """True if the node may be about to end as one that was lost has."""
        return any(now_s - at_s < HOST_DEATH_S for at_s in self._lost_s.get(info.host_id, {}).values())
