"""A simulated cluster: a router with a real policy, nodes with real caches, and hand-overs over links."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from benchmarks.router.events import Events
from benchmarks.router.node import RECEIVE, AttentionAlone, NodeShape, SimulatedNode, Work
from benchmarks.router.workload import Arrival, Workload
from headrace.cache.events import BlockEvicted, BlockStored, CacheEvent, CheckpointEvicted, CheckpointStored
from headrace.cache.hits import PrefixHit, ResumeLocally
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart
from headrace.wire.messages import Role
from router.cluster.cluster_index import NodeIndex
from router.routing.candidates import Candidate, LinkCosts
from router.routing.plan import Objectives, Plan, Policy, RoutedRequest

H200_LINK = LinkCosts(latency_s=0.002, bytes_per_s=50e9)
"""A hand-over between two H200s of one host: few large messages, whose setting up takes longer than their bytes."""

NO_OBJECTIVES = Objectives()

CHANGES = {
    BlockStored: CacheChange.BLOCK_STORED,
    BlockEvicted: CacheChange.BLOCK_EVICTED,
    CheckpointStored: CacheChange.CHECKPOINT_STORED,
    CheckpointEvicted: CacheChange.CHECKPOINT_EVICTED,
}


@dataclass(frozen=True)
class Arrangement:
    """How many nodes of each role, and what they are.

    elastic         any node may do any work; else each keeps to its role
    index_delay_s   until the router knows of a block or a checkpoint that a node has published
    """

    both: int = 0
    prefill: int = 0
    decode: int = 0
    shape: NodeShape = field(kw_only=True)
    elastic: bool = False
    link: LinkCosts = H200_LINK
    index_delay_s: float = 0.002

    @property
    def name(self) -> str:
        parts = (f"{self.prefill}P" * bool(self.prefill), f"{self.decode}D" * bool(self.decode))
        return "".join(parts) + (f"{self.both} undivided" if self.both else "")

    def nodes(self) -> Sequence[tuple[str, Role]]:
        kinds = (("n", Role.BOTH, self.both), ("p", Role.PREFILL, self.prefill), ("d", Role.DECODE, self.decode))
        return sorted((f"{letter}{number:04}", role) for letter, role, many in kinds for number in range(many))


@dataclass(slots=True)
class Outcome:
    """One request's course. `first_stride` and `last_stride` are those of its decode node that gave it its tokens."""

    arrival: Arrival
    plan: Plan | None
    predicted_tokens: int = 0
    computed_tokens: int = 0
    first_s: float = 0.0
    decoding_s: float = 0.0
    end_s: float = 0.0
    decode_node: int = 0
    first_stride: int = 0
    last_stride: int = 0

    @property
    def misjudged_tokens(self) -> int:
        """The difference between the cached tokens that were predicted and those that were found."""
        return abs(self.arrival.num_tokens - self.computed_tokens - self.predicted_tokens)

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.end_s - self.first_s) / (self.arrival.answer_tokens - 1)


class _Known:
    """The router's knowledge of a node: its cache, by events that arrive late."""

    def __init__(self, block_size: int) -> None:
        self.index = NodeIndex(1, block_size)
        self.index.apply(CacheSnapshotPart(1, 0, (), (), is_last=True))
        self.sequence = 0
        self.pending: deque[tuple[float, CacheEvent]] = deque()

    def catch_up(self, until_s: float) -> None:
        pending, changes = self.pending, []
        while pending and pending[0][0] <= until_s:
            event = pending.popleft()[1]
            changes.append((CHANGES[type(event)], event.key))
        if changes:
            self.index.apply(CacheChanges(1, self.sequence + 1, tuple(changes)))
            self.sequence += len(changes)


class SimulatedCluster:
    """Runs a workload through a policy."""

    def __init__(
        self, arrangement: Arrangement, policy: Policy, workload: Workload, objectives: Objectives = NO_OBJECTIVES
    ) -> None:
        self.arrangement = arrangement
        self.outcomes: list[Outcome] = []
        self.decision_s: list[float] = []
        self.events = Events()
        self.nodes: list[SimulatedNode] = []
        self._policy = policy
        self.workload = workload
        self._objectives = objectives
        self._numbers: dict[str, int] = {}
        self._known: list[_Known] = []
        self._running: dict[int, tuple[Outcome, SimulatedNode, Work | None]] = {}
        self._local = ResumeLocally() if arrangement.shape.is_hybrid else AttentionAlone()
        names = [name for name, _ in arrangement.nodes()]
        self._links = {name: {other: arrangement.link for other in names if other != name} for name in names}
        for number, (name, role) in enumerate(arrangement.nodes()):
            known = _Known(arrangement.shape.block_size)
            node = SimulatedNode(
                name,
                role,
                arrangement.shape,
                self.events,
                on_event=partial(self._changed, known),
                on_prefilled=self._prefilled,
                on_finished=partial(self._finished, number),
                token_gap_s=objectives.token_gap_s,
            )
            self._numbers[name] = number
            self._known.append(known)
            self.nodes.append(node)

    def run(self) -> None:
        """Runs until every request has ended."""
        arrivals = self.workload.arrivals()
        self._next(arrivals)
        self.events.run()

    def _next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.events.at(arrival.at_s, self._arrive_in_order, (arrival, arrivals))

    def _arrive_in_order(self, argument: tuple[Arrival, Iterator[Arrival]]) -> None:
        arrival, arrivals = argument
        self._next(arrivals)
        self._arrive(arrival)

    def _changed(self, known: _Known, event: CacheEvent) -> None:
        known.pending.append((self.events.now_s, event))

    # Routing

    def _arrive(self, arrival: Arrival) -> None:
        number = len(self.outcomes)
        request = RoutedRequest(
            number,
            arrival.num_tokens,
            arrival.answer_tokens,
            needs_decode=arrival.answer_tokens > 1,
            objectives=self._objectives,
        )
        candidates = self._candidates(arrival)
        start_s = perf_counter()
        plan = self._policy.choose(request, candidates)
        self.decision_s.append(perf_counter() - start_s)
        outcome = Outcome(arrival, plan)
        self.outcomes.append(outcome)
        if plan is None:
            self._ended(outcome)
            return
        first = self._numbers[plan.prefill]
        prefill, work = self.nodes[first], Work(number, arrival, self._local)
        outcome.predicted_tokens = min(candidates[first].hit.resumable_tokens, arrival.num_tokens - 1)
        if plan.fetch_from is not None:
            source = candidates[self._numbers[plan.fetch_from]]
            outcome.predicted_tokens = min(source.hit.state_tokens, arrival.num_tokens - 1)
            self._fetch(work, prefill, plan.fetch_from)
        if plan.decode is None or plan.decode == plan.prefill:
            self._running[number] = (outcome, prefill, None)
            outcome.decode_node = first
            prefill.prefill(work)
        else:
            outcome.decode_node = self._numbers[plan.decode]
            reserved = Work(number, arrival, RECEIVE)
            self._running[number] = (outcome, prefill, reserved)
            self.nodes[outcome.decode_node].reserve(reserved, lambda _: prefill.prefill(work))

    def _fetch(self, work: Work, prefill: SimulatedNode, source: str) -> None:
        """Lets the work begin with what the source holds now, if that is more than the node's own."""
        most = work.prompt_length - 1
        held, own = (
            work.hit_policy.reusable_tokens(node.cache.match(work.keys, max_tokens=most))
            for node in (self.nodes[self._numbers[source]], prefill)
        )
        if held > own:
            shape = self.arrangement.shape
            num_bytes = (held - own) * shape.bytes_per_token + shape.state_bytes
            work.fetch(held, self.arrangement.link.seconds(num_bytes))

    def _candidates(self, arrival: Arrival) -> list[Candidate]:
        shape, arrived_s = self.arrangement.shape, self.events.now_s - self.arrangement.index_delay_s
        found = []
        for node, known in zip(self.nodes, self._known, strict=True):
            known.catch_up(arrived_s)
            hit = known.index.match(arrival.keys, max_tokens=arrival.num_tokens - 1)
            if not shape.is_hybrid:
                hit = PrefixHit(hit.attention_tokens, hit.attention_tokens, hit.attention_tokens)
            found.append(
                Candidate(
                    node.name,
                    node.role,
                    hit,
                    node.load(),
                    shape.costs,
                    shape.max_step_tokens,
                    shape.block_size,
                    shape.bytes_per_token,
                    shape.state_bytes,
                    self._links[node.name],
                    may_prefill=self.arrangement.elastic or node.role is not Role.DECODE,
                    may_decode=self.arrangement.elastic or node.role is not Role.PREFILL,
                )
            )
        return found

    # The course of a request

    def _prefilled(self, work: Work) -> None:
        outcome, prefill, reserved = self._running[work.number]
        outcome.first_s = self.events.now_s
        outcome.computed_tokens = work.prompt_length - work.reused
        if reserved is None:
            prefill.keep(work)
            return
        shape = self.arrangement.shape
        last_chunk = min(shape.max_step_tokens, work.prompt_length - max(work.reused, reserved.reused))
        num_bytes = max(last_chunk, 0) * shape.bytes_per_token + shape.state_bytes
        landed_s = self.events.now_s + self.arrangement.link.seconds(num_bytes)
        self.events.at(landed_s, self._landed, (outcome, prefill, work, reserved))

    def _landed(self, argument: tuple[Outcome, SimulatedNode, Work, Work]) -> None:
        outcome, prefill, work, reserved = argument
        prefill.release(work)
        self.nodes[outcome.decode_node].decode(reserved)

    def _finished(self, node: int, work: Work) -> None:
        outcome, _, _ = self._running.pop(work.number)
        outcome.end_s = self.events.now_s
        outcome.decoding_s = work.joined_s
        outcome.first_stride, outcome.last_stride = work.first_stride, work.last_stride
        self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        following = self.workload.after(outcome.arrival, self.events.now_s)
        if following is not None:
            self.events.at(following.at_s, self._arrive, following)
