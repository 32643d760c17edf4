"""A simulated node's values: its sizes, the requests on it, and strides of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from benchmarks.router.drafts import NO_DRAFTS, PLAIN, Drafts, StepDrafts
from benchmarks.router.host import NO_HOST, HostCosts
from benchmarks.router.workload import Arrival
from headrace.cache.checkpoints import CheckpointPolicy
from headrace.cache.claims import Claim
from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ReceiveState, ResumeLocally
from headrace.cache.index import Checkpoint
from headrace.cache.publishing import ScheduledChunk
from headrace.step_costs import StepCosts
from router.routing.candidates import LinkCosts

RECEIVE = ReceiveState()
NO_CLIENT = SimpleNamespace(client=0)
"""Traces name no clients."""


class AttentionAlone(ResumeLocally):
    """A model without states: whatever its attention blocks cover need not be computed."""

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return hit.attention_tokens

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return None

    def branch_point(self, hit: PrefixHit) -> int | None:
        return None


@dataclass(frozen=True)
class NodeShape:
    """A node's sizes and costs.

    is_hybrid   False: a model without states; every block can be resumed from
    is_fair     False: prompts in order of arrival, instead of the real scheduler
    pass_rows   as the scheduler's
    drafts      of the answers
    """

    num_blocks: int
    num_slots: int
    block_size: int
    costs: StepCosts
    checkpoints: CheckpointPolicy
    eviction: str
    max_step_tokens: int = 8192
    bytes_per_token: int = 8192
    state_bytes: int = 0
    is_hybrid: bool = True
    is_fair: bool = True
    pass_rows: tuple[int, ...] = ()
    drafts: Drafts = NO_DRAFTS
    host: HostCosts = NO_HOST


@dataclass(frozen=True)
class Fetch:
    """A prefix that another node sends.

    lend   the source's: calls its second argument with the moment from which it can send
    """

    num_tokens: int
    lend: Callable[[Work, Callable[[Work, float], None]], None]
    link: LinkCosts
    num_bytes: int


class Work:
    """A request on one node; what the waiting line, the scheduler and the publisher ask of a sequence is here.

    is_handed_over   to another node, once its prompt is computed
    then             called when it has room
    """

    __slots__ = (
        "answer_checkpoints", "arrival", "boundaries", "claim", "drafts", "fetch", "first_stride", "hit_policy",
        "is_handed_over", "joined_s", "keys", "last_stride", "num_computed", "number", "prefill_length",
        "prompt_checkpoint_positions", "prompt_length", "reused", "source", "then", "token_gap_s",
    )  # fmt: skip
    request = NO_CLIENT
    client_work = 0.0
    is_over_share = False
    may_be_admitted = True
    behind = None
    then: Callable[[Work], None]

    def __init__(self, number: int, source: Arrival, hit_policy: HitPolicy, *, is_handed_over: bool = False) -> None:
        self.number = number
        self.source = source
        self.hit_policy = hit_policy
        self.is_handed_over = is_handed_over
        self.arrival = (source.at_s, number)
        self.keys = source.keys
        self.prompt_length = self.prefill_length = source.num_tokens
        self.num_computed = 0
        self.reused = 0
        self.boundaries: tuple[int, ...] = ()
        self.prompt_checkpoint_positions: list[int] = []
        self.answer_checkpoints: list[Checkpoint] = []
        self.claim: Claim | None = None
        self.joined_s = 0.0
        self.fetch: Fetch | None = None
        self.first_stride = self.last_stride = 0
        self.token_gap_s: float | None = None
        self.drafts: Sequence[int] = ()

    def begin_with(self, fetch: Fetch) -> None:
        """Another node sends its cache of the first tokens once this node has room."""
        self.hit_policy, self.fetch = FetchState(fetch.num_tokens), fetch

    @property
    def ends_here(self) -> bool:
        """True if its node computes its prompt alone."""
        return self.is_handed_over or self.source.answer_tokens == 1

    @property
    def held(self) -> Claim:
        assert self.claim is not None
        return self.claim

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_length


@dataclass(slots=True)
class StrideLog:
    """Every stride with decoding sequences: tokens of each, steps, seconds, and how many sequences decoded."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stride:
    """Steps that differ by their growing contexts alone: step i takes `step_s + i * growth_s`.

    num_decoding   sequences, which get `drafted.tokens` in each
    extra_s        of prompts; such a stride is one step
    """

    start_s: float
    step_s: float
    growth_s: float
    num_steps: int
    num_decoding: int
    chunks: Sequence[ScheduledChunk[Work]] = ()
    extra_s: float = 0.0
    drafted: StepDrafts = PLAIN

    @property
    def seconds(self) -> float:
        return self.extra_s + self._first_s(self.num_steps)

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def last_s(self) -> float:
        """When the last step begins."""
        return self.start_s + self._first_s(self.num_steps - 1)

    def _first_s(self, k: int) -> float:
        return k * self.step_s + self.growth_s * k * (k - 1) / 2

    def cut(self, num_steps: int) -> Stride:
        """The first steps of it."""
        return replace(self, num_steps=num_steps)

    def last_step(self) -> Stride:
        last = self.num_steps - 1
        return replace(self, start_s=self.last_s, step_s=self.step_s + last * self.growth_s, num_steps=1)

    def steps_by(self, now_s: float) -> int:
        """Steps that have begun by `now_s`, at least one."""
        elapsed_s, growth_s = now_s - self.start_s, self.growth_s
        linear_s = self.step_s - growth_s / 2
        if growth_s * self.num_steps < 1e-9 * linear_s:
            num_steps = math.ceil(elapsed_s / linear_s)
        else:
            root = math.sqrt(linear_s * linear_s + 2 * growth_s * elapsed_s)
            num_steps = math.ceil((root - linear_s) / growth_s - 1e-9)
        return min(max(num_steps, 1), self.num_steps)
