"""Metrics of the router that it counts by means of its own."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.metrics import LATENCY_BUCKETS_S, RouterMetrics


def test_gaps_between_tokens_read_as_prometheus_own_histogram_writes_them():
    metrics, registry = RouterMetrics(), CollectorRegistry()
    own = Histogram(
        "headrace_inter_token_seconds",
        "Gaps between two tokens of an answer",
        buckets=LATENCY_BUCKETS_S,
        registry=registry,
    )
    for count, seconds in [(1, 0.5), (4, 1.0), (2, 256.0), (1, 0.0), (8, 0.0625), (1, 0.53125)]:
        metrics.next_tokens(count, seconds)
        for _ in range(count):
            own.observe(seconds / count)
    assert lines_of(metrics.exposition()) == lines_of(generate_latest(registry))


def lines_of(exposition: bytes) -> list[str]:
    lines = exposition.decode().splitlines()
    return [line for line in lines if "inter_token_seconds" in line and "_created " not in line]
