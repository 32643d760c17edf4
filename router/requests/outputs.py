"""Outputs of a request for its client, and the sink that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.errors import ApiError
from router.requests import events as ev


@dataclass(frozen=True)
class Ended:
    """The last output of a request; `failure` None: it is completed."""

    failure: ApiError | None


Output = ev.Show | ev.ShowPrompt | Ended


class OutputSink(Protocol):
    """Takes the outputs of one request for its client."""

    @property
    def is_complete(self) -> bool:
        """True once the text contains a stop string: no later token is wanted."""
        ...

    @property
    def has_room(self) -> bool:
        """False while the client has left too much unread."""
        ...

    def put(self, output: Output) -> None: ...

    async def room(self) -> None:
        """Waits while there is no room."""
        ...
