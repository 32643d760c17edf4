"""Resumable requests that this router has left on nodes which may not know it. Pure.

A node that stood still, or was cut off, finds its calls broken when it goes on, and keeps their requests for another
router: from where it stands, this one is lost. It names them in its next heartbeat, whose answer says which to give up.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.cluster.node_id import NodeId

MOST_OF_A_NODE = 256
"""As many as a node keeps (`MAX_ORPHANS`). A node that kept none names none: the oldest ones are forgotten."""


class LeftRequests:
    """Ids of requests, by the node on which they were left."""

    def __init__(self) -> None:
        self._left: dict[NodeId, dict[str, bool]] = {}  # True: the node has named it

    def add(self, node: NodeId, request_id: str) -> None:
        """The request ends, or goes on elsewhere; what the node computes for it is for nobody."""
        ids = self._left.setdefault(node, {})
        ids[request_id] = False
        if len(ids) > MOST_OF_A_NODE:
            del ids[next(iter(ids))]

    def among(self, node: NodeId, orphans: Sequence[str]) -> tuple[str, ...]:
        """The orphans that were left on this node. An answer may be lost on the way: an id is forgotten when the node
        names it no longer, or has ended."""
        for other in [each for each in self._left if each[0] == node[0] and each != node]:
            del self._left[other]
        ids = self._left.get(node, {})
        named = tuple(request_id for request_id in orphans if request_id in ids)
        for request_id in [
            request_id for request_id, was_named in ids.items() if was_named and request_id not in named
        ]:
            del ids[request_id]
        ids.update(dict.fromkeys(named, True))
        return named
