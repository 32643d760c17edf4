"""The wait of a cluster's actors for resources, pure: when it is in vain, and what to report meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deploy.errors import StartFailed
from deploy.resources import Demand, Host, impossible, inventory, waiting

NOTE_AFTER_S = 5.0  # before that, actors of an earlier cluster may be ending


class ResourceWatch:
    """Judges the wait that began at `start_s` for actors with these `demands`.

    Actors that Ray's hosts can never hold end it at once, or `join_timeout_s` after its beginning: hosts may join until
    then. Until actors are placed, a note is due when they have waited for a moment, and again when it changes.
    """

    def __init__(self, demands: Sequence[Demand], start_s: float, join_timeout_s: float) -> None:
        self._demands = demands
        self._join_deadline_s = start_s + join_timeout_s
        self._note_at_s = start_s + NOTE_AFTER_S
        self._noted: list[str] = []

    def look(self, hosts: Sequence[Host], unplaced: Collection[str], now_s: float) -> str | None:
        """A note to log, if one is due. `unplaced`: names of the actors for which Ray has found no host yet.

        Raises StartFailed, with what is missing.
        """
        never = impossible(self._demands, hosts)
        if never and now_s >= self._join_deadline_s:
            remedy = "Ask for less in `placement`, start Ray with more, or set ray.join_timeout_s if hosts join later."
            raise StartFailed("\n".join(["Ray cannot hold this cluster:", *never, *inventory(hosts), remedy]))
        if now_s < self._note_at_s:
            return None
        missing = never or [str(demand) for demand in self._short(hosts, unplaced)]
        if not missing or missing == self._noted:
            return None
        self._noted = missing
        return "\n".join([f"waiting for resources: {missing[0]}", *missing[1:], *inventory(hosts)])

    def late(self, hosts: Sequence[Host], unplaced: Collection[str], pending: Sequence[str]) -> str:
        """The message for actors that are still `pending` at the start's deadline."""
        short = self._short(hosts, unplaced)
        lines = [f"not ready in time: {', '.join(pending)}", *(f"{demand}, and waits for it" for demand in short)]
        if not short:
            return f"{lines[0]}; raise ray.start_timeout_s if they only take long"
        return "\n".join([*lines, *inventory(hosts), "Ask for less in `placement`, or free what others hold."])

    def _short(self, hosts: Sequence[Host], unplaced: Collection[str]) -> list[Demand]:
        return waiting((demand for demand in self._demands if demand.name in unplaced), hosts)
