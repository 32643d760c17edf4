"""Hosts that may be dying: one has just lost a node under a request, and its other nodes may follow. Pure."""

from __future__ import annotations

from headrace.wire.node_messages import NodeInfo

HOST_DEATH_S = 2.0
"""Within so much of one another the nodes of a host that dies end: those of killed raylets within 0.67 s, on two cores
with a load of 10."""


class HostDeaths:
    """The hosts on which one request lost a node, without a word, in the last HOST_DEATH_S.

    A request that may itself be what ends nodes is given to no node of such a host: whatever that one dies of, it could
    be the host, and the request would be blamed for it. A node that is lost later was asked when it had outlived the
    host's other one: that loss is another.
    """

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def node_lost(self, info: NodeInfo, now_s: float) -> None:
        """A node that does not say where it runs dies alone."""
        if info.host_id:
            self._lost_s[info.host_id] = now_s

    def may_include(self, info: NodeInfo, now_s: float) -> bool:
        """True if the node may be about to end as one that was lost has."""
        lost_s = self._lost_s.get(info.host_id)
        return lost_s is not None and now_s - lost_s < HOST_DEATH_S
