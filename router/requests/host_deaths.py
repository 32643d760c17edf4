"""Hosts that may be dying: one has just lost a node under a request, and its other nodes may follow. Pure."""

from __future__ import annotations

from headrace.wire.node_messages import NodeInfo
from router.cluster.node_id import NodeId

HOST_DEATH_S = 2.0
"""Seconds in which all nodes of a dying host end. Nodes of killed raylets ended within 0.67 s of one another, on two
cores with a load of 10."""


class HostDeaths:
    """The nodes that one request has lost in the last HOST_DEATH_S, without a word: their hosts may be dying with them.

    A suspect request, one that may itself be what ends nodes, is given to no node of such a host: that node might end
    with its host, and the request would be blamed for it. It is given to such a node once HOST_DEATH_S have passed. If
    that node is lost, too, the loss is another one, for which the host's death is no explanation.
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
