"""Trace contexts, and spans through OpenTelemetry."""

import builtins
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.config import ConfigError
from headrace.otel import OtelTracing
from headrace.tracing import Outcome, Stage, TracingConfig, context_of, open_tracing
from tests.support.patience import PATIENCE_S

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (("traceparent", f"00-{TRACE}-{SPAN}-{flags}") for flags in ("01", "00"))


@pytest.mark.parametrize(
    ("headers", "context"),
    [
        ({}, ()),
        (dict([SAMPLED]), (SAMPLED,)),
        ({"traceparent": SAMPLED[1], "tracestate": "a=b"}, (SAMPLED, ("tracestate", "a=b"))),
        ({"traceparent": SAMPLED[1], "tracestate": "a" * 600}, (SAMPLED,)),
        ({"tracestate": "a=b"}, ()),
        ({"traceparent": f"01-{TRACE}-{SPAN}-01-more"}, (("traceparent", f"01-{TRACE}-{SPAN}-01-more"),)),
        *(({"traceparent": wrong}, ()) for wrong in ("", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01")),
        ({"traceparent": f"00-{TRACE.upper()}-{SPAN}-01"}, ()),
    ],
)
def test_a_context_is_passed_on_as_it_came_or_not_at_all(headers: dict[str, str], context: object):
    assert context_of(headers) == context


def spans_of(sample: float, parent: Any) -> tuple[InMemorySpanExporter, Any]:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter), sample, "headrace-router", "r", clock=lambda: 100.0)
    return exporter, tracing.begin("request", parent, 100.0)


def test_work_becomes_a_span_of_its_callers_trace_with_one_for_each_stage():
    exporter, work = spans_of(0.0, (SAMPLED, ("tracestate", "a=b")))
    assert work.is_recorded  # the caller has decided
    work.end(Outcome(103.0, [Stage("queue", 100.0, 101.0), Stage("decode", 101.0, 103.0)], {"n": 1}, "broken"))
    queue, decode, request = exporter.get_finished_spans()
    assert (queue.name, decode.name, request.name) == ("queue", "decode", "request")
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == SPAN
    assert {queue.parent.span_id, decode.parent.span_id} == {request.context.span_id}
    assert [round((span.end_time - span.start_time) / 1e9, 6) for span in (queue, decode, request)] == [1, 2, 3]
    assert (request.start_time, request.end_time) == (queue.start_time, decode.end_time)
    assert request.attributes["n"] == 1 and request.status.description == "broken"
    assert dict(work.context) == {
        "traceparent": f"00-{TRACE}-{request.context.span_id:016x}-01",
        "tracestate": "a=b",
    }


@pytest.mark.parametrize(("sample", "parent"), [(0.0, ()), (1.0, (UNSAMPLED,))])
def test_work_that_is_not_sampled_has_no_span_and_says_so_to_others(sample: float, parent: Any):
    exporter, work = spans_of(sample, parent)
    work.end(Outcome(101.0))
    assert not work.is_recorded and not exporter.get_finished_spans()
    assert not int(dict(work.context)["traceparent"][-2:], 16) & 1


def test_without_tracing_a_context_goes_on_and_opentelemetry_is_not_imported():
    work = open_tracing(None, "headrace-node", "p0").begin("call", (SAMPLED,), 0.0)
    assert (work.context, work.is_recorded) == ((SAMPLED,), False)
    code = "import sys, router.server; print([name for name in sys.modules if 'opentelemetry.sdk' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_the_extra_tracing_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "headrace.otel":
            raise ImportError("No module named 'opentelemetry.sdk'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"install headrace\[otel\]"):
        open_tracing(TracingConfig("http://127.0.0.1:4318"), "headrace-router", "r")
