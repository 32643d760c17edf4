"""Moves of running requests between decode nodes, as values: for a drain, and for any planner that balances load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from router.cluster.nodes import NodeEntry
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import Decoding


class MoveOutcome(Enum):
    """The end of a move.

    moved       the receiver has blocks and state, and decodes
    stayed      it decodes where it did: nobody had room for it, or it did not decode yet
    recomputed  the move failed, and the request begins again, with prompt and tokens so far
    ended       its answer was complete, or its client left, before it could move
    """

    MOVED = "moved"
    STAYED = "stayed"
    RECOMPUTED = "recomputed"
    ENDED = "ended"


@dataclass(frozen=True)
class Move:
    """A move under way. `moves_before`: how often the request had moved until then."""

    receiver: NodeEntry
    moves_before: int
    outcome: asyncio.Future[MoveOutcome]

    def settle(self, life: RequestLifecycle) -> MoveOutcome:
        """Sets the outcome by what the request does now that it moves no longer."""
        outcome = MoveOutcome.RECOMPUTED
        if life.report.moves > self.moves_before:
            outcome = MoveOutcome.MOVED
        elif life.is_over:
            outcome = MoveOutcome.ENDED
        elif isinstance(life.state, Decoding):
            outcome = MoveOutcome.STAYED
        if not self.outcome.done():
            self.outcome.set_result(outcome)
        return outcome


class Movable(Protocol):
    """An open request; see `RequestDriver`."""

    life: RequestLifecycle

    def serves_on(self, node: NodeEntry) -> bool: ...
    async def move(self, receiver: NodeEntry) -> MoveOutcome: ...
    async def leave_nodes(self) -> None: ...
