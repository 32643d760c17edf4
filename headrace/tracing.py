"""Traces of requests: W3C contexts in and out of calls, and spans, where a config asks for them.

Spans are made of work that is over, from the times that were noted while it went on: nothing on a request's way makes
one. `headrace.otel` exports them and is imported only where tracing is on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.config import ConfigError, at_least, refuse

PARENT, STATE = "traceparent", "tracestate"
MAX_STATE_LENGTH = 512  # as many as the W3C asks everybody to pass on
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

TraceContext = tuple[tuple[str, str], ...]
"""The headers of a trace context, as they are sent on; empty: the request is in no trace."""
Value = str | int | float | bool

current: ContextVar[TraceContext] = ContextVar("headrace.trace", default=())
"""The context that calls made now carry: that of the work that makes them."""


@dataclass(frozen=True)
class TracingConfig:
    """Settings of tracing; spans need the extra `otel`.

    endpoint  address of an OTLP receiver over HTTP, such as http://127.0.0.1:4318; spans go to /v1/traces there
    sample    share of the requests that get spans, where their client has not decided that for its trace
    """

    endpoint: str
    sample: float = 1.0

    def __post_init__(self) -> None:
        fault = f"endpoint {self.endpoint!r}: must begin with http:// or https://"
        above = f"sample {self.sample}: must be at most 1"
        refuse(
            [] if self.endpoint.startswith(("http://", "https://")) else [fault],
            at_least(self, 0, "sample"),
            [above] if self.sample > 1 else [],
        )


class Stage(NamedTuple):
    """A part of some work, in seconds of the clock of its process."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = {}


@dataclass(frozen=True)
class Outcome:
    """The end of some work. `error`: why it failed; empty: it has not."""

    end_s: float
    stages: Sequence[Stage] = ()
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


class TracedWork(Protocol):
    """Work in progress. `context` is what those get who do a part of it."""

    context: TraceContext
    is_recorded: bool

    def end(self, outcome: Outcome) -> None: ...


class Tracing(Protocol):
    """Makes spans of work, or does nothing."""

    def begin(self, name: str, parent: TraceContext, start_s: float) -> TracedWork: ...
    def close(self) -> None: ...


class Untraced:
    """Work that gets no span; its callers' context goes on."""

    is_recorded = False

    def __init__(self, context: TraceContext) -> None:
        self.context = context

    def end(self, outcome: Outcome) -> None:
        pass


class NoTracing:
    """Tracing that is off."""

    def begin(self, name: str, parent: TraceContext, start_s: float) -> TracedWork:
        return Untraced(parent)

    def close(self) -> None:
        pass


def open_tracing(config: TracingConfig | None, service: str, instance: str) -> Tracing:
    """The tracing of a process, `instance` among those of its `service`; raises ConfigError without the extra."""
    if config is None:
        return NoTracing()
    try:
        from headrace.otel import exporting
    except ImportError as error:
        message = f"tracing needs OpenTelemetry ({error}): install headrace[otel], or leave tracing out"
        raise ConfigError(message) from None
    return exporting(config, service, instance)


def context_of(headers: Mapping[str, str]) -> TraceContext:
    """The trace context in the headers of a call; empty for one that is missing or not as the W3C has it."""
    parent, state = headers.get(PARENT, ""), headers.get(STATE, "")
    if not _PARENT.fullmatch(parent):
        return ()
    return ((PARENT, parent), (STATE, state)) if 0 < len(state) <= MAX_STATE_LENGTH else ((PARENT, parent),)
