"""Metrics of requests for Prometheus, as the router counts them; `router.cluster_metrics` has those of nodes."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.wire.node_messages import Role
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry
from router.cluster_metrics import ClusterCollector
from router.errors import NODE_CRASHED
from router.requests.lifecycle import RequestLifecycle
from router.requests.stages import STAGES, ended_s, stages_of
from router.requests.states import RequestPhase
from router.routing.decisions import Decision

RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 1.03, 1.1, 1.33, 2, 4, 10)
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)


class GapHistogram(Collector):
    """A histogram for gaps between tokens, several at once, counted by one thread.

    Each token has one: prometheus_client's own takes 1.7 us a gap, this one 0.3.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._created_s = time.time()
        self._counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """Counts `count` gaps that took so long together."""
        self._counts[bisect_left(LATENCY_BUCKETS_S, seconds / count)] += count
        self._sum_s += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = map(floatToGoString, (*LATENCY_BUCKETS_S, math.inf))
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, buckets, self._sum_s)
        family.add_sample(f"{self._name}_created", {}, self._created_s)
        yield family


class RouterMetrics:
    """Counters of what clients asked and got. What nodes did, they count themselves: `ClusterCollector` shows it.

    model, policy, router   labels of `headrace_build_info`; `model` of the histograms of whole requests, too
    """

    def __init__(self, model: str = "", policy: str = "", router: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Info("headrace_build", "The release that serves, its model and its policy", registry=self.registry)
        build.info({"version": version("headrace"), "model": model, "policy": policy, "router": router})
        requests = self._counter("requests", "Requests that ended; each of n choices is one", ["outcome"])
        self._requests = {each: requests.labels(each) for each in ("completed", "failed", "cancelled")}
        self._request_seconds = self._of_requests(
            "request_seconds", "Completed requests, from their arrival to their last token", REQUEST_BUCKETS_S
        ).labels(model)
        stage_seconds = self._of_requests(
            "request_stage_seconds",
            "Stages of completed requests: queue until a node has the prompt, prefill until the first token is shown, "
            "hand_over until blocks and state have landed (what prefill does not hide), decode until the end",
            REQUEST_BUCKETS_S,
            "stage",
        )
        # Looked up once: `labels` costs as much as the count itself.
        self._stage_seconds = {stage: stage_seconds.labels(model, stage) for stage in STAGES}
        self._prompt_tokens = self._of_requests(
            "prompt_tokens", "Prompts of requests that ended", TOKEN_BUCKETS
        ).labels(model)
        self._answer_tokens = self._of_requests("answer_tokens", "Answers of completed requests", TOKEN_BUCKETS).labels(
            model
        )
        self._responses = self._counter(
            "http_responses",
            "HTTP answers, refusals included; code is an error's",
            ["route", "status", "code"],
        )
        tokens = self._counter("tokens", "Tokens of requests that ended; cached ones are of the prompt", ["kind"])
        self._tokens = {kind: tokens.labels(kind) for kind in ("prompt", "cached", "generated")}
        self._migrations = self._counter("migrations", "Requests that went on on another decode node", [])
        self._drained = self._counter("drained_requests", "Requests of nodes that were drained, or left", ["outcome"])
        self._move_seconds = self._histogram("move_seconds", "Moves of running requests: no token comes meanwhile")
        self._quarantined = self._counter("quarantined_requests", "Requests that ended as node_crashed", [])
        self._waiting = Gauge(
            "headrace_requests_waiting_for_node",
            "Requests that have a place, and wait for a node that is busy or was lost",
            ["role"],
            registry=self.registry,
        )
        self._fell_behind = self._counter(
            "unread_answers", "Times that a node's stream was not read on because its client read too slowly", []
        )
        self._decisions = self._counter(
            "routing_decisions", "Routing decisions: plan, why, and for what", ["plan", "reason", "cause"]
        )
        self._role_changes = self._counter("role_changes", "Nodes whose role the planner has changed", ["role"])
        self._predictions = Histogram(
            "headrace_prediction_ratio",
            "Outcomes of routing decisions, divided by what the policy predicted",
            ["quantity"],
            buckets=RATIO_BUCKETS,
            registry=self.registry,
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "From a request to its first token")
        self._itl = GapHistogram("headrace_inter_token_seconds", "Gaps between two tokens of an answer")
        self.registry.register(self._itl)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace_{name}", text, buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def _of_requests(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"headrace_{name}", text, ["model", *labels], buckets=buckets, registry=self.registry)

    def watch(
        self,
        nodes: Callable[[], Sequence[NodeEntry]],
        phases: Callable[[], dict[RequestPhase, int]],
        index: ClusterIndex,
        is_ready: Callable[[], bool],
    ) -> None:
        """Adds metrics that are read from nodes, open requests and the index at every scrape."""
        self.registry.register(ClusterCollector(nodes, phases, index, is_ready))

    def http_response(self, route: str, status: int, code: str) -> None:
        """Counts an HTTP answer; `code` is the error's, empty for a success."""
        self._responses.labels(route, str(status), code).inc()

    def first_token(self, seconds: float) -> None:
        """Records a request's time to first token."""
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Records `count` tokens that came together, `seconds` after the last."""
        self._itl.observe(count, seconds)

    def waiting_for_node(self, role: Role) -> AbstractContextManager[None]:
        """Counts a request as waiting for a node of this role."""
        return self._waiting.labels(role.value).track_inprogress()

    def reader_fell_behind(self) -> None:
        """Counts a pause in reading a node's stream, because of a client that reads too slowly."""
        self._fell_behind.inc()

    def decided(self, decision: Decision) -> None:
        """Counts a routing decision by its plan and reason."""
        self._decisions.labels(decision.plan_kind, decision.plan.reason, decision.cause).inc()

    def role_changed(self, role: Role) -> None:
        """Counts a change by the planner of roles."""
        self._role_changes.labels(role.value).inc()

    def predicted(self, quantity: str, ratio: float) -> None:
        """Records an outcome divided by its prediction."""
        self._predictions.labels(quantity).observe(ratio)

    def request_ended(self, life: RequestLifecycle) -> None:
        """Counts a request that is done, failed or was abandoned by its client."""
        outcome = "completed" if life.phase is RequestPhase.DONE else "failed"
        if life.failure is not None and life.failure.code == "client_left":
            outcome = "cancelled"
        self._requests[outcome].inc()
        if life.failure is not None and life.failure.code == NODE_CRASHED:
            self._quarantined.inc()
        num_prompt = life.request.num_prompt_tokens
        self._tokens["prompt"].inc(num_prompt)
        self._tokens["cached"].inc(life.report.cached_tokens(num_prompt))
        self._tokens["generated"].inc(len(life.generated))
        self._migrations.inc(life.report.migrations)
        self._prompt_tokens.observe(num_prompt)
        if outcome == "completed":
            self._answer_tokens.observe(len(life.generated))
            self._request_seconds.observe(ended_s(life) - life.entered_s[RequestPhase.QUEUED])
            for stage in stages_of(life):
                self._stage_seconds[stage.name].observe(stage.end_s - stage.start_s)

    def request_moved(self, seconds: float) -> None:
        """Records a move of a running request: no token comes in these seconds."""
        self._move_seconds.observe(seconds)

    def requests_drained(self, outcome: str, count: int) -> None:
        """Counts requests of a node that was drained, or has left."""
        self._drained.labels(outcome).inc(count)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
