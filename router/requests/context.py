"""The parts of a running router that its requests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from headrace.cache.known_prompts import KnownPrompts
from headrace.tracing import NoTracing, Tracing
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeTable
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.requests.answer_lengths import AnswerLengths
from router.requests.table import RequestTable
from router.routing.candidates import Candidate
from router.routing.decisions import DecisionLog
from router.routing.ledger import Ledger
from router.routing.plan import Policy
from router.routing.policies.times import prompt_wait_s, room_within_gap
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
    known_prompts: KnownPrompts = field(default_factory=KnownPrompts)
    tracing: Tracing = field(default_factory=NoTracing)

    def room_within_gap(self) -> float:
        """How many requests more the nodes can answer within the token gap of the config.

        Infinite if it names none, if `on_missed_objectives` leaves none waiting, or if there is no node to decode: then
        requests wait for one. Paused answers take no room.
        """
        token_gap_s = self.config.objectives.token_gap_s
        if token_gap_s is None or self.config.on_missed_objectives != "queue":
            return math.inf
        nodes = [each for each in self._candidates(0) if each.may_decode]
        return sum(room_within_gap(each, token_gap_s) for each in nodes) if nodes else math.inf

    def prompt_wait_s(self, num_tokens: int) -> float:
        """Seconds by which the prompts that the nodes have delay one of so many tokens, where it waits least."""
        nodes, token_gap_s = self._candidates(num_tokens), self.config.objectives.token_gap_s
        return min((prompt_wait_s(each, num_tokens, token_gap_s) for each in nodes if each.may_prefill), default=0.0)

    def _candidates(self, num_tokens: int) -> Sequence[Candidate]:
        """The live nodes, for a prompt of so many tokens of which nothing is cached."""
        roles = {node.info.name: node.role for node in self.nodes.live()}
        return self.snapshots.take(roles, {}, num_tokens, self.clock())
