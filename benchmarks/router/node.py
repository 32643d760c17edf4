"""A simulated node: the real cache, publisher and scheduler, and steps that take what `StepCosts` says.

Steps without prompts come in strides: nothing changes until a sequence ends, so that as many steps as that takes are
one event. What arrives meanwhile ends the stride with the step that is under way, or, if steps are launched ahead
(`HostCosts`), with the one behind it.

Differences from a real node: all sequences take part in each step, and get as many tokens if it has drafts; a request
claims blocks for its whole answer when it is admitted, so that nothing is ever preempted; the checkpoint that an answer
leaves is published at its end; a landing waits for the end of a step as an admission does.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from benchmarks.router.drafts import NO_DRAFTS, PLAIN, StepDrafts
from benchmarks.router.events import Events
from benchmarks.router.first_come import FirstCome
from benchmarks.router.turns import Turns
from benchmarks.router.work import NodeShape, Stride, StrideLog, Work
from headrace.cache.events import CacheEvent
from headrace.cache.eviction import eviction_policy
from headrace.cache.hits import FetchState
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.stats import CacheStats
from headrace.engine.scheduling.cost_fit import KEPT_GAPS
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_budget import TokenCost
from headrace.engine.scheduling.waiting import WaitingLine
from headrace.step_costs import TIMED_STEPS, StepShape
from headrace.wire.node_messages import Role
from router.routing.candidates import Load

ROUNDING = 1e-9
"""Part of a token that is none: sums of fractions are not exact."""
TRUSTED_STEPS = 99
"""Steps that a node has timed before the run: the router believes its costs."""
ENGINE_BLOCK_TOKENS = 16
"""Tokens of a block as the scheduler sees it, however long the blocks of a trace are."""


class SimulatedNode:
    """One node.

    on_prefilled   called with a work whose prompt is computed: its first token is there
    on_finished    called with a work whose last token is there; its claim has been released
    """

    def __init__(
        self,
        name: str,
        role: Role,
        shape: NodeShape,
        events: Events,
        *,
        on_events: Callable[[Sequence[CacheEvent]], None],
        on_prefilled: Callable[[Work], None],
        on_finished: Callable[[Work], None],
        token_gap_s: float | None = None,
        seed: int = 0,
    ) -> None:
        """`seed`: with the name, of how late each step is."""
        self.name = name
        self.role = role
        self.shape = shape
        self.strides = StrideLog()
        self.busy_s = 0.0
        self.prefill_busy_s = 0.0
        self.prompt_s = 0.0
        self.counted = Counter({TIMED_STEPS: TRUSTED_STEPS, "sampled_tokens": 0})
        self.cache = PrefixCache(
            num_blocks=shape.num_blocks,
            num_slots=shape.num_slots,
            block_size=shape.block_size,
            eviction=eviction_policy(shape.eviction),
            on_events=on_events,
        )
        self._events = events
        self._costs = costs = shape.costs
        self._token_cost = TokenCost.in_tokens(costs.token_s / costs.depth_s if costs.depth_s else math.inf)
        self._publisher = Publisher(self.cache, shape.checkpoints)
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._token_gap_s = token_gap_s
        self._dice = Random(f"{seed}/{name}")
        self._line = WaitingLine()
        self._reserved: set[Work] = set()
        self._prefilling: list[Work] = []
        self._joining: list[Work] = []  # that decode from the next step on
        self._decoding: list[tuple[int, int, Work]] = []  # a heap by the token that ends each
        self._context_tokens = 0
        self._num_tokens = 0  # that a sequence would have had which decodes from the beginning
        self._token_part = 0.0  # of the next one
        self._num_strides = 0  # that decode, the newest included
        self._ending: tuple[list[Work], list[Work], Stride, int] | None = None
        """Prompts and answers that end with the stride under way, once that is counted; its part not logged yet,
        and what each answer gets in that."""
        self._turns = Turns(events, shape.host, self)

    # Orders

    def prefill(self, work: Work) -> None:
        """Computes a prompt once there is room for it, and decodes it if it is not handed over."""
        work.then = self._start_prefill
        self._turns.order(self._admit, work)

    def reserve(self, work: Work, then: Callable[[Work], None]) -> None:
        """Claims what a prompt that another node computes needs, once there is room, and calls `then`."""

        def reserved(work: Work) -> None:
            self._reserved.add(work)
            then(work)

        work.then = reserved
        self._turns.order(self._admit, work)

    def decode(self, work: Work) -> None:
        """The prompt of a reserved work has landed: it decodes from the next step on."""
        self._turns.order(self._landed, work)

    def lend(self, work: Work, then: Callable[[Work, float], None]) -> None:
        """Calls `then` with the moment from which this node can send what another one fetches for `work`."""
        self._turns.order(lambda work: then(work, self._turns.launched_s), work)

    def release(self, work: Work) -> None:
        """Gives back what a work holds that is not decoded here, and admits those that waited for it."""
        self.cache.release(work.held)
        work.claim = None
        self._reserved.discard(work)
        self._admit_waiting()

    def leave_line(self, work: Work) -> None:
        """Takes a work that waits for room out of the line."""
        self._line.leave(work)  # type: ignore[arg-type]
        self._admit_waiting()

    # State

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._joining)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def others_hold_room(self) -> bool:
        """True if something is reserved here for prompts that other nodes compute."""
        return bool(self._reserved)

    def waits(self, work: Work) -> bool:
        """True if it waits for room here."""
        return work in list(self._line)  # type: ignore[comparison-overlap]

    def load(self, stats: CacheStats) -> Load:
        """The node's work, with the room that its cache has by these figures."""
        left = [work.prefill_length - work.num_computed for work in self._prefilling]
        depths = sum(
            StepShape.prefill(work.num_computed, work.prefill_length).prefill_depths for work in self._prefilling
        )
        for work in self._line:
            left.append(work.prefill_length)
            depths += StepShape.prefill(0, work.prefill_length).prefill_depths
        lengths = [0] * max((each.bit_length() for each in left), default=0)
        for each in left:
            lengths[each.bit_length() - 1] += each
        return Load(
            num_decoding=len(self._decoding),
            context_tokens=self._context_tokens,
            waiting_tokens=sum(left),
            waiting_depths=depths,
            waiting_lengths=tuple(lengths),
            free_tokens=(stats.blocks.free + stats.blocks.cached) * self.shape.block_size,
            free_slots=stats.slots.free + stats.slots.cached,
        )

    # Admission

    def _admit(self, work: Work) -> None:
        self._line.join(work)  # type: ignore[arg-type]
        if self._next_waiting() is work:
            self._admit_waiting()

    def _next_waiting(self) -> Work | None:
        """The next to be admitted: traces name no clients."""
        return self._line.first({}) if self.shape.is_fair else self._line.earliest  # type: ignore[return-value]

    def _admit_waiting(self) -> None:
        while (work := self._next_waiting()) is not None:
            policy = work.hit_policy
            claim = self.cache.claim(
                work.keys,
                num_tokens=work.prompt_length + work.source.answer_tokens,
                hit_policy=policy,
                max_reuse_tokens=policy.reuse_limit(work.prompt_length),
            )
            if claim is None:
                return
            self._line.admitted(work)  # type: ignore[arg-type]
            work.claim = claim
            work.reused = claim.reused_tokens
            self._turns.took_in()
            work.then(work)

    def _start_prefill(self, work: Work) -> None:
        work.num_computed = work.reused
        if work.fetch is None:
            self._compute(work)
            return
        fetch, free_s = work.fetch, self._turns.launched_s  # nothing lands before: what was launched may use its blocks

        def lent(work: Work, at_s: float) -> None:
            sent_s, landing_s = at_s + fetch.link.seconds(fetch.num_bytes), fetch.link.latency_s
            self._events.at(max(sent_s, free_s + landing_s), self._fetched, work)

        fetch.lend(work, lent)

    def _fetched(self, work: Work) -> None:
        self._turns.order(self._resume_fetched, work)

    def _resume_fetched(self, work: Work) -> None:
        assert isinstance(work.hit_policy, FetchState)
        work.num_computed = work.reused = work.hit_policy.num_tokens
        self._publisher.publish_blocks(work)
        self._publisher.keep_received(work)
        self._compute(work)

    def _compute(self, work: Work) -> None:
        self._prefilling.append(work)
        self._turns.changed()

    def _landed(self, work: Work) -> None:
        work.num_computed = work.prompt_length
        self._reserved.discard(work)
        self._publisher.publish_blocks(work)
        self._publisher.keep_decoded(work)
        self._joining.append(work)
        self._turns.changed()

    # Steps, as the turns ask for them

    @property
    def has_news(self) -> bool:
        return bool(self._prefilling or self._joining)

    def only_prompts_follow(self, stride: Stride) -> bool:
        answers_begin = any(
            chunk.span.end == chunk.sequence.prefill_length and not chunk.sequence.ends_here for chunk in stride.chunks
        )
        return not (stride.num_decoding or self._joining or answers_begin)

    def compose(self) -> Stride | None:
        joined, self._joining = self._joining, []
        for work in joined:
            remaining = work.source.answer_tokens - 1
            work.first_stride = self._num_strides
            self._context_tokens += work.prompt_length + 1
            heapq.heappush(self._decoding, (self._num_tokens + remaining, work.number, work))
        num_decoding, answers = len(self._decoding), StepShape(len(self._decoding), self._context_tokens)
        has_prompts = bool(self._prefilling)
        if not num_decoding and not has_prompts:
            return None
        costs, start_s = self._costs, self._turns.start_s(num_decoding, has_prompts=has_prompts)
        for work in joined:
            work.joined_s = start_s
        drafted = self._drafts(answers)
        decode_s = costs.decode_part_s(replace(answers, num_drafts=sum(drafted.counts)))
        self._num_strides += bool(num_decoding)
        if has_prompts:
            chunks = self._schedule(num_decoding, drafted)
            self._publisher.prepare(chunks)
            shape = StepShape()
            for chunk in chunks:
                shape += StepShape.prefill(chunk.span.start, chunk.span.end)
            prefill_s = costs.prefill_part_s(shape)
            if num_decoding:
                prefill_s = max(0.0, prefill_s + self._late_s())
            self.prefill_busy_s += prefill_s
            self.prompt_s += costs.prompt_work_s(shape)
            return Stride(start_s, decode_s, 0.0, 1, num_decoding, chunks, prefill_s, drafted)
        step_s = max(decode_s, self.shape.host.turn_s(num_decoding, 0, has_prompts=False))  # from the second step on
        missing = self._decoding[0][0] - self._num_tokens - self._token_part
        num_steps = math.ceil(missing / drafted.tokens - ROUNDING)
        growth_s = costs.context_s * num_decoding * drafted.tokens
        return Stride(start_s, step_s, growth_s, num_steps, num_decoding, drafted=drafted)

    def _drafts(self, answers: StepShape) -> StepDrafts:
        """Drafts of a step with these answers."""
        if self.shape.drafts == NO_DRAFTS:
            return PLAIN
        waiting = sum((StepShape.prefill(w.num_computed, w.prefill_length) for w in self._prefilling), StepShape())
        shape = self.shape
        return shape.drafts.of_step(shape.costs, answers, waiting, shape.max_step_tokens, self._token_gap_s)

    def _late_s(self) -> float:
        """How late a step with prompts beside answers is: exponentially distributed, on average not at all.

        What `costs.late_s` says holds for it: KEPT_GAPS of these steps are less late.
        """
        mean_s = self._costs.late_s / (-math.log(1 - KEPT_GAPS) - 1)
        return mean_s * (self._dice.expovariate(1.0) - 1)

    def _schedule(self, num_decoding: int, drafted: StepDrafts) -> list[ScheduledChunk[Work]]:
        shape, decodes = self.shape, [work for _, _, work in self._decoding]
        if not shape.is_fair:
            return FirstCome(shape.max_step_tokens - num_decoding).schedule(self._prefilling)
        for number, (end, _, work) in enumerate(self._decoding):
            work.num_computed = work.prompt_length + work.source.answer_tokens - 1 - (end - self._num_tokens)
            work.token_gap_s = self._token_gap_s
            work.drafts = range(drafted.counts[number]) if drafted.counts else ()
        places = len(decodes) + len(self._prefilling)
        scheduler = Scheduler(
            shape.max_step_tokens, places, ENGINE_BLOCK_TOKENS, self._token_cost, pass_rows=shape.pass_rows
        )
        chunks = scheduler.schedule([*decodes, *self._prefilling], self._costs)  # type: ignore[list-item]
        return chunks[num_decoding:]  # type: ignore[return-value]

    def advance(self, stride: Stride) -> None:
        num_tokens = 0
        if stride.num_decoding:
            num_tokens = self._count(stride)
        finished, prefilled = [], []
        while self._decoding and self._decoding[0][0] <= self._num_tokens:
            end, _, work = heapq.heappop(self._decoding)
            self._context_tokens -= work.source.num_tokens + work.source.answer_tokens + self._num_tokens - end
            finished.append(work)
        for chunk in stride.chunks:
            work = chunk.sequence
            work.num_computed = chunk.span.end
            self._publisher.written(chunk)
            if not work.is_prefilling:
                self._prefilling.remove(work)
                prefilled.append(work)
                if not work.ends_here:
                    self._joining.append(work)
        last = stride
        if stride.num_decoding and stride.num_steps > 1 and self._events.now_s < stride.end_s:
            last = stride.last_step()  # apart from those before it: the host may have the tokens of it alone wait
            tokens_before, num_tokens = num_tokens - round(last.drafted.tokens), round(last.drafted.tokens)
            self._log(tokens_before, stride.num_steps - 1, last.start_s - stride.start_s, stride.num_decoding)
            self._num_strides += 1
        self._ending = prefilled, finished, last, num_tokens

    def _count(self, stride: Stride) -> int:
        """Counts what the answers of a stride get; returns the tokens of each."""
        drafted, number = stride.drafted, stride.num_decoding
        tokens = self._token_part + stride.num_steps * drafted.tokens
        num_tokens = int(tokens + ROUNDING)
        self._token_part = max(0.0, tokens - num_tokens)
        self._num_tokens += num_tokens
        self._context_tokens += num_tokens * number
        self.counted[TIMED_STEPS] += stride.num_steps
        self.counted["sampled_tokens"] += num_tokens * number
        if drafted.counts:
            self.counted["draft_steps"] += stride.num_steps
            self.counted["drafted_tokens"] += stride.num_steps * sum(drafted.counts)
            self.counted["accepted_tokens"] += (num_tokens - stride.num_steps) * number
        return num_tokens

    def settle(self, stride: Stride) -> None:
        if self._ending is None:
            self.advance(stride)
        assert self._ending is not None
        (prefilled, finished, last, num_tokens), self._ending = self._ending, None
        self.busy_s += stride.seconds
        if stride.num_decoding:
            self._log(num_tokens, last.num_steps, self._events.now_s - last.start_s, last.num_decoding)
        for work in prefilled:
            self._on_prefilled(work)
            if work.source.answer_tokens == 1 and not work.is_handed_over:
                self._finish(work)
        for work in finished:
            self._finish(work)

    def _log(self, num_tokens: int, num_steps: int, seconds: float, num_decoding: int) -> None:
        self.strides.tokens.append(num_tokens)
        self.strides.steps.append(num_steps)
        self.strides.seconds.append(seconds)
        self.strides.batch.append(num_decoding)

    def _finish(self, work: Work) -> None:
        source, size = work.source, self.shape.block_size
        work.last_stride = len(self.strides.tokens)
        num_computed = min(source.num_tokens + source.answer_tokens - 1, len(work.keys) * size)
        if num_computed > work.num_computed:
            boundary = num_computed // size * size
            work.num_computed = boundary
            self._publisher.publish_blocks(work)
            self._publisher.keep_decoded(work)
        self._on_finished(work)
        self.release(work)
