"""Open connections, bounded in all and by client. One client's idle ones do not keep out another's first."""

from __future__ import annotations

from typing import Protocol

from router.http.limits import HttpLimits
from router.http.shares import Shares


class Connection(Protocol):
    @property
    def is_idle(self) -> bool:
        """True while no request of it has come whole, or is being answered."""
        ...

    def give_way(self) -> None:
        """Ends it at once."""
        ...


class Connections:
    """The connections of one server."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limit = limits.max_connections
        self._shares = Shares(
            "connections", limits.max_connections, "max_connections", limits.max_connections_per_client
        )
        self._open: dict[str, dict[Connection, None]] = {}  # by client, the oldest first

    def __len__(self) -> int:
        return self._shares.total

    def opened(self, connection: Connection, client: str) -> None:
        """Counts one; raises ApiError where a limit would be passed.

        Beyond the limit of all it takes the place of an idle one, of the client with the most connections, if that has
        more than this client then will have.
        """
        if self._shares.total >= self._limit:
            self._make_room(client)
        self._shares.take(client, 1)
        self._open.setdefault(client, {})[connection] = None

    def closed(self, connection: Connection, client: str) -> None:
        """Counts one no more; does nothing for one that was not counted."""
        own = self._open.get(client, {})
        if connection in own:
            del own[connection]
            self._shares.give_back(client, 1)
            if not own:
                del self._open[client]

    def _make_room(self, client: str) -> None:
        most = max(self._open, key=lambda each: len(self._open[each]))
        if len(self._open[most]) > len(self._open.get(client, ())) + 1:
            idle = next((each for each in self._open[most] if each.is_idle), None)
            if idle is not None:
                self.closed(idle, most)
                idle.give_way()
