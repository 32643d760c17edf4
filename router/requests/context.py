"""The parts of a running router that its requests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from headrace.tracing import NoTracing, Tracing
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeTable
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.requests.answer_lengths import AnswerLengths
from router.requests.table import RequestTable
from router.routing.decisions import DecisionLog
from router.routing.ledger import Ledger
from router.routing.plan import Policy
from router.routing.policies.times import prompt_wait_s
from router.routing.sessions import Sessions
from router.routing.snapshots import Snapshots


@dataclass(frozen=True)
class RouterContext:
    """Made once, by `RouterServer`; each request's driver gets it.

    clock       yields seconds
    decisions   of the last requests
    numbers     count the decisions
    """

    config: RouterConfig
    nodes: NodeTable
    table: RequestTable
    policy: Policy
    ledger: Ledger
    snapshots: Snapshots
    metrics: RouterMetrics
    index: ClusterIndex
    clock: Callable[[], float]
    decisions: DecisionLog = field(default_factory=DecisionLog)
    answers: AnswerLengths = field(default_factory=AnswerLengths)
    numbers: Iterator[int] = field(default_factory=count)
    sessions: Sessions = field(default_factory=Sessions)
    tracing: Tracing = field(default_factory=NoTracing)

    def prompt_wait_s(self, num_tokens: int) -> float:
        """Seconds by which the prompts that the nodes have delay one of so many tokens, where it waits least."""
        roles = {node.info.name: node.role for node in self.nodes.live()}
        nodes = self.snapshots.take(roles, {}, num_tokens, self.clock())
        token_gap_s = self.config.objectives.token_gap_s
        return min((prompt_wait_s(each, num_tokens, token_gap_s) for each in nodes if each.may_prefill), default=0.0)
