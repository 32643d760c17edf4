"""Every request that the router holds, and the last ones that it held: pure bookkeeping over their lives."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from headrace.request import Request
from router.errors import IllegalEvent
from router.requests.events import Event, Instruction
from router.requests.lifecycle import RequestLife
from router.requests.states import RequestPhase

RECENT = 20


class RequestTable:
    """Requests by id: events in, instructions out. Times come in from outside, in seconds."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._open: dict[str, RequestLife] = {}
        self._recent: deque[RequestLife] = deque(maxlen=RECENT)
        self.ended: Counter[RequestPhase] = Counter()

    def open(self, request: Request, now_s: float) -> RequestLife:
        """Takes a new request in, queued; its id must not be in use."""
        if request.request_id in self._open:
            raise IllegalEvent(f"request {request.request_id} is already in the table")
        life = RequestLife(request, max_attempts=self._max_attempts, now_s=now_s)
        self._open[request.request_id] = life
        return life

    def on(self, request_id: str, event: Event, now_s: float) -> list[Instruction]:
        """Passes an event on to a request's life, see `RequestLife.on`."""
        return self._open[request_id].on(event, now_s)

    def close(self, request_id: str) -> RequestLife:
        """Forgets a request that is over, but for the page's list of recent ones."""
        life = self._open[request_id]
        if not life.is_over:
            raise IllegalEvent(f"request {request_id} is still {life.phase.value}")
        del self._open[request_id]
        self.ended[life.phase] += 1
        self._recent.append(life)
        return life

    def counts(self) -> dict[RequestPhase, int]:
        """Open requests by phase, and how many ended done or failed since the start."""
        open_ones = Counter(life.phase for life in self._open.values())
        return {phase: open_ones[phase] + self.ended[phase] for phase in RequestPhase}

    def rows(self, now_s: float) -> Iterator[dict[str, Any]]:
        """For /cluster: open requests, oldest first, then the recent ones, newest first."""
        for life in (*self._open.values(), *reversed(self._recent)):
            yield {
                "id": life.request.request_id,
                "phase": life.phase.value,
                "prompt_tokens": life.request.num_prompt_tokens,
                "generated_tokens": len(life.generated),
                "prefill_node": life.report.prefill_node,
                "decode_node": life.report.decode_node,
                "cached_tokens": life.report.cached_tokens(life.request.num_prompt_tokens),
                "migrations": life.report.migrations,
                "age_s": round(now_s - life.entered_s[RequestPhase.QUEUED], 3),
                "error": None if life.failure is None else life.failure.message,
            }
