"""Sessions: the nodes that served the last request of each, for ties between nodes. Pure."""

from __future__ import annotations

from collections import OrderedDict

KEPT_SESSIONS = 4096


class Sessions:
    """The last nodes of the sessions that have asked most recently, `KEPT_SESSIONS` at the most."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def nodes_of(self, session: str) -> tuple[str, ...]:
        """Names of the nodes, the one that generated first; none for a session that is new, or empty."""
        return self._nodes.get(session, ())

    def served(self, session: str, *nodes: str | None) -> None:
        """Notes the nodes of a session's newest request, the one that generates first; an empty session is none."""
        if not session:
            return
        self._nodes[session] = tuple(dict.fromkeys(node for node in nodes if node is not None))
        self._nodes.move_to_end(session)
        if len(self._nodes) > KEPT_SESSIONS:
            self._nodes.popitem(last=False)
