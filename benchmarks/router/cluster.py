"""A simulated cluster: a router with a real policy, nodes with real caches, and hand-overs over links.

A request that waits long for room on a prefill node while it holds a reservation gives that back and is routed again,
as a real one is: else two nodes could wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.router.events import Events
from benchmarks.router.node import SimulatedNode
from benchmarks.router.view import RouterView
from benchmarks.router.work import RECEIVE, AttentionAlone, Fetch, NodeShape, Work
from benchmarks.router.workload import Arrival, Workload
from headrace.cache.hits import ResumeLocally
from headrace.wire.node_messages import Role
from node_runtime.config import RuntimeConfig
from router.routing.candidates import LinkCosts
from router.routing.plan import NO_OBJECTIVES, Objectives, Plan, Policy, RoutedRequest
from router.routing.role_planner import RoleChange, RolePlanner

H200_LINK = LinkCosts(latency_s=0.002, bytes_per_s=50e9)
"""A hand-over between two H200s of one host: few large messages, whose setting up takes longer than their bytes."""

HEARTBEAT_S = 2.0
ADMIT_WITHIN_S = RuntimeConfig.admission_timeout_s
"""How long a request holds a reservation and waits for room on its prefill node behind reservations for others."""


@dataclass(frozen=True)
class Arrangement:
    """How many nodes of each role, and what they are.

    prefill_shape   what nodes of the role prefill are, if not the same
    elastic         any node may do any work; else each keeps to its role
    index_delay_s   until the router knows of a block or a checkpoint that a node has published
    role_window_s   of the router's planner of roles; None: it changes none
    """

    both: int = 0
    prefill: int = 0
    decode: int = 0
    shape: NodeShape = field(kw_only=True)
    prefill_shape: NodeShape | None = None
    elastic: bool = False
    link: LinkCosts = H200_LINK
    index_delay_s: float = 0.002
    role_window_s: float | None = None

    @property
    def name(self) -> str:
        parts = (f"{self.prefill}P" * bool(self.prefill), f"{self.decode}D" * bool(self.decode))
        return "".join(parts) + (f"{self.both} undivided" if self.both else "")

    def nodes(self) -> Sequence[tuple[str, Role]]:
        kinds = (("n", Role.BOTH, self.both), ("p", Role.PREFILL, self.prefill), ("d", Role.DECODE, self.decode))
        return sorted((f"{letter}{number:04}", role) for letter, role, many in kinds for number in range(many))


@dataclass(slots=True)
class Outcome:
    """One request's course. `first_stride` and `last_stride` are those of its decode node that gave it its tokens.

    avoided   nodes that had no room for it
    """

    arrival: Arrival
    plan: Plan | None = None
    predicted_tokens: int = 0
    computed_tokens: int = 0
    first_s: float = 0.0
    decoding_s: float = 0.0
    end_s: float = 0.0
    decode_node: int = 0
    first_stride: int = 0
    last_stride: int = 0
    avoided: set[str] = field(default_factory=set)

    @property
    def misjudged_tokens(self) -> int:
        """The difference between the cached tokens that were predicted and those that were found."""
        return abs(self.arrival.num_tokens - self.computed_tokens - self.predicted_tokens)

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.end_s - self.first_s) / (self.arrival.answer_tokens - 1)


class SimulatedCluster:
    """Runs a workload through a policy."""

    def __init__(
        self,
        arrangement: Arrangement,
        policy: Policy,
        workload: Workload,
        objectives: Objectives = NO_OBJECTIVES,
        seed: int = 0,
    ) -> None:
        """`seed`: of how late steps with prompts beside answers are."""
        shape = arrangement.shape
        self.arrangement = arrangement
        self.workload = workload
        self.outcomes: list[Outcome] = []
        self.events = Events()
        self._policy = policy
        self._router_s = shape.host.router_s
        self.objectives = objectives
        window_s = arrangement.role_window_s
        self._planner = RolePlanner(window_s) if window_s is not None else None
        self.role_changes: list[tuple[float, RoleChange]] = []
        self.num_decisions = 0
        self._num_open = 0  # arrivals that are known of, and requests in progress
        self._running: dict[int, _Course] = {}
        self._local = ResumeLocally() if shape.is_hybrid else AttentionAlone()
        self._view = RouterView(
            is_elastic=arrangement.elastic,
            is_hybrid=shape.is_hybrid,
            link=arrangement.link,
            index_delay_s=arrangement.index_delay_s,
        )
        self.nodes = [
            SimulatedNode(
                name,
                role,
                arrangement.prefill_shape or shape if role is Role.PREFILL else shape,
                self.events,
                on_events=self._view.feed(name, shape.block_size, self.events).add,
                on_prefilled=self._prefilled,
                on_finished=self._finished,
                token_gap_s=objectives.token_gap_s,
                seed=seed,
            )
            for name, role in arrangement.nodes()
        ]
        self._by_name = {node.name: node for node in self.nodes}
        self._numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self._view.register(self.nodes)

    def run(self) -> None:
        """Runs until every request has ended. Raises RuntimeError if some never do."""
        self._next(self.workload.arrivals())
        self._heartbeat(None)
        self.events.run()
        if self._running:
            raise RuntimeError(f"{len(self._running)} requests wait for each other, or fit no node")

    def _next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self._num_open += 1
            self.events.at(arrival.at_s, self._arrive_in_order, (arrival, arrivals))

    def _arrive_in_order(self, argument: tuple[Arrival, Iterator[Arrival]]) -> None:
        arrival, arrivals = argument
        self._next(arrivals)
        self._arrive(arrival)

    def _heartbeat(self, _: None) -> None:
        reports = self._view.heartbeat(self.events.now_s)
        change = self._planner.sample(self.events.now_s, reports) if self._planner is not None else None
        if change is not None:
            self._view.switch(change.node, change.role)
            self.role_changes.append((self.events.now_s, change))
        if self._num_open:
            self.events.at(self.events.now_s + HEARTBEAT_S, self._heartbeat, None)

    # Routing

    def _arrive(self, arrival: Arrival) -> None:
        outcome = Outcome(arrival)
        self.outcomes.append(outcome)
        if self._router_s:
            self.events.at(self.events.now_s + self._router_s, self._route, outcome)
        else:
            self._route(outcome)

    def _route(self, outcome: Outcome) -> None:
        arrival, number = outcome.arrival, self.num_decisions
        self.num_decisions += 1
        request = RoutedRequest(
            number,
            arrival.num_tokens,
            arrival.answer_tokens,
            needs_decode=arrival.answer_tokens > 1,
            waited_s=self.events.now_s - arrival.at_s,
            objectives=Objectives(arrival.first_token_s).over(self.objectives),
            caches_are_short=self._view.caches_are_short,
        )
        self._view.catch_up(self.events.now_s)
        candidates = self._view.candidates(arrival, self.events.now_s, avoided=outcome.avoided)
        plan = self._policy.choose(request, candidates)
        if plan is None and outcome.avoided:
            outcome.avoided.clear()
            candidates = self._view.candidates(arrival, self.events.now_s)
            plan = self._policy.choose(request, candidates)
        outcome.plan = plan
        if plan is None:
            self._ended(outcome)
            return
        hits = {each.name: each.hit for each in candidates}
        self._view.ledger.sent(request, plan, candidates, {self.arrangement.shape.block_size: arrival.keys})
        outcome.predicted_tokens = min(hits[plan.prefill].resumable_tokens, arrival.num_tokens - 1)
        decodes_there = plan.decode in (None, plan.prefill)
        work = Work(number, arrival, self._local, is_handed_over=not decodes_there)
        prefill = self._by_name[plan.prefill]
        if plan.fetch_from is not None:
            outcome.predicted_tokens = min(hits[plan.fetch_from].state_tokens, arrival.num_tokens - 1)
            self._fetch(work, prefill, plan.fetch_from)
        if plan.decode is None or decodes_there:
            outcome.decode_node = self._numbers[plan.prefill]
            self._running[number] = _Course(outcome, prefill, work, None)
            prefill.prefill(work)
        else:
            outcome.decode_node = self._numbers[plan.decode]
            reserved = Work(number, arrival, RECEIVE)
            self._running[number] = course = _Course(outcome, prefill, work, reserved)
            self._by_name[plan.decode].reserve(reserved, partial(self._reserved, course))

    def _fetch(self, work: Work, prefill: SimulatedNode, source: str) -> None:
        """Lets the work begin with what the source holds now, if that is more than the node's own."""
        most = work.prompt_length - 1
        sender = self._by_name[source]
        held, own = (
            work.hit_policy.reusable_tokens(node.cache.match(work.keys, max_tokens=most)) for node in (sender, prefill)
        )
        if held > own:
            shape = self.arrangement.shape
            num_bytes = (held - own) * shape.bytes_per_token + shape.state_bytes
            work.begin_with(Fetch(held, sender.lend, self.arrangement.link, num_bytes))

    def _reserved(self, course: _Course, reserved: Work) -> None:
        self._view.ledger.reserved(reserved.number)
        course.prefill.prefill(course.work)
        if course.work.claim is None:
            self.events.at(self.events.now_s + ADMIT_WITHIN_S, self._give_up, course)

    def _give_up(self, course: _Course) -> None:
        """Routes a request again that still waits for room on its prefill node, behind reservations for others."""
        if course.reserved is None or not course.prefill.waits(course.work):
            return
        if not course.prefill.others_hold_room:
            self.events.at(self.events.now_s + ADMIT_WITHIN_S, self._give_up, course)
            return
        course.prefill.leave_line(course.work)
        course.outcome.avoided.add(course.prefill.name)
        del self._running[course.work.number]
        self.nodes[course.outcome.decode_node].release(course.reserved)
        self._view.ledger.ended(course.work.number, self.events.now_s)
        self._route(course.outcome)

    # The course of a request

    def _prefilled(self, work: Work) -> None:
        course = self._running[work.number]
        outcome, reserved = course.outcome, course.reserved
        outcome.first_s = self.events.now_s
        outcome.computed_tokens = work.prompt_length - work.reused
        self._view.ledger.prompt_computed(work.number, self.events.now_s)
        if reserved is None:
            return
        shape = course.prefill.shape
        last_chunk = min(shape.max_step_tokens, work.prompt_length - max(work.reused, reserved.reused))
        num_bytes = max(last_chunk, 0) * shape.bytes_per_token + shape.state_bytes
        self.events.at(self.events.now_s + self.arrangement.link.seconds(num_bytes), self._landed, course)

    def _landed(self, course: _Course) -> None:
        assert course.reserved is not None
        course.prefill.release(course.work)
        self.nodes[course.outcome.decode_node].decode(course.reserved)

    def _finished(self, work: Work) -> None:
        outcome = self._running.pop(work.number).outcome
        outcome.end_s = self.events.now_s
        outcome.decoding_s = work.joined_s
        outcome.first_stride, outcome.last_stride = work.first_stride, work.last_stride
        self._view.ledger.ended(work.number, self.events.now_s)
        self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        self._num_open -= 1
        following = self.workload.after(outcome.arrival, self.events.now_s)
        if following is not None:
            self._num_open += 1
            self.events.at(following.at_s, self._arrive, following)


@dataclass(frozen=True, slots=True)
class _Course:
    """One attempt at a request: its work on the prefill node, and what is reserved on another one for its answer."""

    outcome: Outcome
    prefill: SimulatedNode
    work: Work
    reserved: Work | None
