"""The requests in the router, and the last ones that ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from router.cluster.nodes import NodeEntry
from router.errors import IllegalEvent
from router.requests.lifecycle import RequestLifecycle
from router.requests.moves import Movable
from router.requests.stages import stages_of
from router.requests.states import RequestPhase

RECENT = 20


class RequestTable:
    """Lists requests for /cluster and /metrics; each request's driver adds and closes its own."""

    def __init__(self) -> None:
        self._open: dict[str, RequestLifecycle] = {}
        self._movable: dict[str, Movable] = {}
        self._recent: deque[_Ended] = deque(maxlen=RECENT)
        self.ended: Counter[RequestPhase] = Counter()

    def __contains__(self, request_id: str) -> bool:
        """True while a request with this id is open."""
        return request_id in self._open

    def add(self, life: RequestLifecycle, movable: Movable | None = None) -> None:
        """Adds a new request, whose id must not be in use. `movable`: what moves it from node to node."""
        request_id = life.request.request_id
        if request_id in self._open:
            raise IllegalEvent(f"request {request_id} is already in the table")
        self._open[request_id] = life
        if movable is not None:
            self._movable[request_id] = movable

    def served_on(self, node: NodeEntry) -> list[Movable]:
        """The open requests that the node serves for this router, oldest first."""
        return [request for request in self._movable.values() if request.serves_on(node)]

    def close(self, life: RequestLifecycle) -> None:
        """Moves a request that is over to the recent ones."""
        if not life.is_over:
            raise IllegalEvent(f"request {life.request.request_id} is still {life.phase.value}")
        del self._open[life.request.request_id]
        self._movable.pop(life.request.request_id, None)
        self.ended[life.phase] += 1
        self._recent.append(_Ended(life.entered_s[RequestPhase.QUEUED], _row(life, 0.0)))

    def counts(self) -> dict[RequestPhase, int]:
        """Open requests by phase, and how many were completed or failed since the start."""
        open_ones = Counter(life.phase for life in self._open.values())
        return {phase: open_ones[phase] + self.ended[phase] for phase in RequestPhase}

    def rows(self, now_s: float) -> Iterator[dict[str, Any]]:
        """Rows of /cluster: open requests, oldest first, then the recent ones, newest first."""
        for life in self._open.values():
            yield _row(life, now_s) | {"age_s": _age_s(life.entered_s[RequestPhase.QUEUED], now_s)}
        for ended in reversed(self._recent):
            yield ended.row | {"age_s": _age_s(ended.queued_s, now_s)}


@dataclass(frozen=True)
class _Ended:
    """A recent request's row. A whole life would keep its prompt, which may be a million tokens."""

    queued_s: float
    row: dict[str, Any]


def _row(life: RequestLifecycle, now_s: float) -> dict[str, Any]:
    queued_s = life.entered_s[RequestPhase.QUEUED]
    stages = [
        {
            "stage": stage.name,
            "node": stage.attributes.get("headrace.node"),
            "start_s": round(stage.start_s - queued_s, 6),
            "seconds": round(stage.end_s - stage.start_s, 6),
        }
        for stage in stages_of(life, now_s)
    ]
    return {
        "id": life.request.request_id,
        "phase": life.phase.value,
        "prompt_tokens": life.request.num_prompt_tokens,
        "generated_tokens": len(life.generated),
        "prefill_node": life.report.prefill_node,
        "decode_node": life.report.decode_node,
        "cached_tokens": life.report.cached_tokens(life.request.num_prompt_tokens),
        "migrations": life.report.migrations,
        "moves": life.report.moves,
        "age_s": 0.0,
        "stages": stages,
        "error": None if life.failure is None else life.failure.message,
    }


def _age_s(queued_s: float, now_s: float) -> float:
    return round(now_s - queued_s, 3)
