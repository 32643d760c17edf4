"""Spans through OpenTelemetry: imported only where tracing is on."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.tracing import Outcome, TraceContext, TracedWork, TracingConfig

PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0

_propagator = TraceContextTextMapPropagator()


def exporting(config: TracingConfig, service: str, instance: str) -> OtelTracing:
    """Tracing whose spans go to the config's endpoint, in batches and from a thread of their own."""
    exporter = OTLPSpanExporter(endpoint=config.endpoint.rstrip("/") + PATH, timeout=EXPORT_TIMEOUT_S)
    return OtelTracing(BatchSpanProcessor(exporter), config.sample, service, instance)


class OtelTracing:
    """Spans of work by its noted times. `clock` yields the seconds in which these are."""

    def __init__(
        self,
        processor: SpanProcessor,
        sample: float,
        service: str,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(sampler=ParentBasedTraceIdRatio(sample), resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")
        self._offset_ns = time.time_ns() - int(clock() * 1e9)

    def begin(self, name: str, parent: TraceContext, start_s: float) -> TracedWork:
        """Starts a span in the trace of `parent`, or in a new one."""
        context = _propagator.extract(dict(parent))
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=self._ns(start_s))
        return _OtelWork(self._tracer, span, self._ns)

    def close(self) -> None:
        """Sends what is left, for as long as one export may take."""
        self._provider.force_flush(int(EXPORT_TIMEOUT_S * 1000))
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return self._offset_ns + int(seconds * 1e9)


class _OtelWork:
    """Work with a span; `ns` turns its seconds into those of the world."""

    def __init__(self, tracer: Tracer, span: Span, ns: Callable[[float], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._ns = ns
        self._inside = set_span_in_context(span)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._inside)
        self.context: TraceContext = tuple(carrier.items())
        self.is_recorded = span.is_recording()

    def end(self, outcome: Outcome) -> None:
        """Ends the span, with one below it for each stage."""
        for stage in outcome.stages:
            part = self._tracer.start_span(
                stage.name, self._inside, attributes=dict(stage.attributes), start_time=self._ns(stage.start_s)
            )
            part.end(self._ns(stage.end_s))
        self._span.set_attributes(dict(outcome.attributes))
        if outcome.error:
            self._span.set_status(Status(StatusCode.ERROR, outcome.error))
        self._span.end(self._ns(outcome.end_s))
