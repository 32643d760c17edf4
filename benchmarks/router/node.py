"""A simulated node: the real cache, publisher and scheduler, and steps that take what `StepCosts` says.

Steps without prompts come in strides: nothing changes until a sequence ends, so that as many steps as that takes are
one event. What arrives meanwhile ends the stride with the step that is under way.

Differences from a real node: all sequences take part in each step; a request claims blocks for its whole answer when it
is admitted, so that nothing is ever preempted; the checkpoint that an answer leaves is published at its end; a landing
waits for the end of a step as an admission does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from benchmarks.router.events import Events
from benchmarks.router.first_come import FirstCome
from benchmarks.router.work import NodeShape, Stride, StrideLog, Work
from headrace.cache.events import CacheEvent
from headrace.cache.eviction import eviction_policy
from headrace.cache.hits import FetchState
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.stats import CacheStats
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_budget import TokenCost
from headrace.engine.waiting import WaitingLine
from headrace.step_costs import StepShape
from headrace.wire.node_messages import Role
from router.routing.candidates import Load

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
    ) -> None:
        self.name = name
        self.role = role
        self.shape = shape
        self.strides = StrideLog()
        self.busy_s = 0.0
        self.prefill_busy_s = 0.0
        self.cache = PrefixCache(
            num_blocks=shape.num_blocks,
            num_slots=shape.num_slots,
            block_size=shape.block_size,
            eviction=eviction_policy(shape.eviction),
            on_events=on_events,
        )
        self._events = events
        self._costs = shape.costs
        costs = shape.costs
        self._token_cost = TokenCost.in_tokens(costs.token_s / costs.depth_s if costs.depth_s else math.inf)
        self._publisher = Publisher(self.cache, shape.checkpoints)
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._token_gap_s = token_gap_s
        self._line = WaitingLine()
        self._reserved: set[Work] = set()
        self._prefilling: list[Work] = []
        self._landed: list[Work] = []
        self._decoding: list[tuple[int, int, Work]] = []  # a heap by the step that ends each
        self._context_tokens = 0
        self._num_steps = 0  # that decoded
        self._stride: Stride | None = None
        self._is_settling = False

    # Orders

    def prefill(self, work: Work) -> None:
        """Computes a prompt once there is room for it, and decodes it unless `hand_over` takes it away."""
        self._admit(work, self._start_prefill)

    def reserve(self, work: Work, then: Callable[[Work], None]) -> None:
        """Claims what a prompt that another node computes needs, once there is room, and calls `then`."""

        def reserved(work: Work) -> None:
            self._reserved.add(work)
            then(work)

        self._admit(work, reserved)

    def decode(self, work: Work) -> None:
        """The prompt of a reserved work has landed: it decodes from the next step on."""
        work.num_computed = work.prompt_length
        self._reserved.discard(work)
        self._publisher.publish_blocks(work)
        self._publisher.keep_decoded(work)
        self._landed.append(work)
        self._cut_stride()
        self._wake()

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
        return len(self._prefilling) + len(self._decoding) + len(self._landed)

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

    def _admit(self, work: Work, then: Callable[[Work], None]) -> None:
        work.then = then
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
            work.then(work)

    def _start_prefill(self, work: Work) -> None:
        work.num_computed = work.reused
        if work.fetch_s is None:
            self._compute(work)
        else:
            self._events.at(self._events.now_s + work.fetch_s, self._fetched, work)

    def _fetched(self, work: Work) -> None:
        assert isinstance(work.hit_policy, FetchState)
        work.num_computed = work.reused = work.hit_policy.num_tokens
        self._publisher.publish_blocks(work)
        self._publisher.keep_received(work)
        self._compute(work)

    def _compute(self, work: Work) -> None:
        self._prefilling.append(work)
        self._cut_stride()
        self._wake()

    def _join(self, work: Work) -> None:
        remaining = work.source.answer_tokens - 1
        work.joined_s = self._events.now_s
        work.first_stride = len(self.strides.steps)
        self._context_tokens += work.prompt_length + 1
        heapq.heappush(self._decoding, (self._num_steps + remaining, work.number, work))

    # Steps

    def _wake(self) -> None:
        if self._stride is None and not self._is_settling:
            self._begin()

    def _begin(self) -> None:
        for work in self._landed:
            self._join(work)
        self._landed.clear()
        num_decoding, context = len(self._decoding), self._context_tokens
        costs = self._costs
        decode_s = costs.step_s + costs.decode_s * num_decoding + costs.context_s * context if num_decoding else 0.0
        if self._prefilling:
            chunks = self._schedule(num_decoding)
            self._publisher.prepare(chunks)
            shape = StepShape()
            for chunk in chunks:
                shape += StepShape.prefill(chunk.span.start, chunk.span.end)
            prefill_s = costs.prefill_part_s(shape)
            self.prefill_busy_s += prefill_s
            stride = Stride(self._events.now_s, decode_s, 0.0, 1, chunks, prefill_s)
        elif num_decoding:
            stride = Stride(
                self._events.now_s, decode_s, costs.context_s * num_decoding, self._decoding[0][0] - self._num_steps
            )
        else:
            return
        self._stride = stride
        self._events.at(stride.start_s + stride.seconds, self._end, stride)

    def _schedule(self, num_decoding: int) -> list[ScheduledChunk[Work]]:
        shape, decodes = self.shape, [work for _, _, work in self._decoding]
        if not shape.is_fair:
            return FirstCome(shape.max_step_tokens - num_decoding).schedule(self._prefilling)
        for end_step, _, work in self._decoding:
            work.num_computed = work.prompt_length + work.source.answer_tokens - 1 - (end_step - self._num_steps)
            work.token_gap_s = self._token_gap_s
        places = len(decodes) + len(self._prefilling)
        scheduler = Scheduler(
            shape.max_step_tokens, places, ENGINE_BLOCK_TOKENS, self._token_cost, pass_rows=shape.pass_rows
        )
        chunks = scheduler.schedule([*decodes, *self._prefilling], self._costs)  # type: ignore[list-item]
        return chunks[num_decoding:]  # type: ignore[return-value]

    def _cut_stride(self) -> None:
        """Ends a stride of several steps with the one under way; the call for its former end finds it replaced."""
        stride = self._stride
        if stride is None or stride.num_steps == 1:
            return
        num_steps = stride.steps_by(self._events.now_s)
        if num_steps < stride.num_steps:
            self._stride = cut = stride.cut(num_steps)
            self._events.at(max(cut.start_s + cut.seconds, self._events.now_s), self._end, cut)

    def _end(self, stride: Stride) -> None:
        if stride is not self._stride:
            return  # it was cut
        self._stride, self._is_settling = None, True
        num_decoding = len(self._decoding)
        self.busy_s += stride.seconds
        if num_decoding:
            log = self.strides
            log.steps.append(stride.num_steps)
            log.seconds.append(stride.seconds)
            log.batch.append(num_decoding)
            self._num_steps += stride.num_steps
            self._context_tokens += stride.num_steps * num_decoding
        finished = []
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            finished.append(heapq.heappop(self._decoding)[2])
        for chunk in stride.chunks:
            self._computed(chunk)
        for work in finished:
            self._finish(work)
        self._is_settling = False
        self._begin()

    def _computed(self, chunk: ScheduledChunk[Work]) -> None:
        work = chunk.sequence
        work.num_computed = chunk.span.end
        self._publisher.written(chunk)
        if not work.is_prefilling:
            self._prefilling.remove(work)
            self._on_prefilled(work)

    def keep(self, work: Work) -> None:
        """Goes on with a prompt just computed: decodes it, or finishes it if one token was all."""
        if work.source.answer_tokens > 1:
            self._join(work)
        else:
            self._finish(work)

    def _finish(self, work: Work) -> None:
        source, size = work.source, self.shape.block_size
        work.last_stride = len(self.strides.steps)
        if source.answer_tokens > 1:
            self._context_tokens -= source.num_tokens + source.answer_tokens
        num_computed = min(source.num_tokens + source.answer_tokens - 1, len(work.keys) * size)
        if num_computed > work.num_computed:
            boundary = num_computed // size * size
            work.num_computed = boundary
            self._publisher.publish_blocks(work)
            self._publisher.keep_decoded(work)
        self._on_finished(work)
        self.release(work)
