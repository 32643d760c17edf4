"""One node's engine: its step schedules chunks, launches them, and settles the tokens they draw. One thread.

With `overlap`, a step is launched before the tokens of the step before it are known. Scheduling needs only lengths. The
runner fills in the drawn tokens on the device, and counts them there for penalties. If a sequence turns out to have
ended, the later step has computed one token too many, which is dropped. Whatever else needs the value of a token waits
until the token is known: block hashes, masks of grammars, and preemptions.

Behind a step with drafts, the host does not even know lengths. The next step is launched before they are known only if
the model's layer makes the drafts, and if every token is drawn by logits and position alone (`Sequence.draws_alike`).
The device then finds the places of its tokens.

`EngineLoop` (headrace/engine/loop.py) drives it; prefill and decode nodes differ only in the jobs they submit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch

from headrace.cache.checkpoints import CheckpointPolicy
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import ScheduledChunk
from headrace.cache.tails import Tail
from headrace.engine.drafts.drafting import Drafting
from headrace.engine.drafts.steps import EngineDrafts
from headrace.engine.failures import NeedsMoreMemory, OutOfMemory, blamed, first_line, is_first_prefill, log_summary
from headrace.engine.intake import BadRequest
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.step_masks import StepMasks, WantedMask
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.scheduling.client_work import ClientWork
from headrace.engine.scheduling.load import step_shape
from headrace.engine.scheduling.scheduler import Scheduler, VictimPolicy, after_turn
from headrace.engine.scheduling.yielding import NOTHING_YIELDED
from headrace.engine.sequence import Failed, Sequence, Started
from headrace.engine.step import InFlight, Shortage, StepBuilder
from headrace.engine.tail_rows import TailRows
from headrace.grammar import Grammars
from headrace.step_costs import StepCosts

log = logging.getLogger(__name__)

HOST_SHARE = 1 / 8
"""Share of a step's time that commands may take while it runs. Admissions may take as much again; launching the next
step takes a third."""

LEAD = 2.0
"""Making the next step begins before the device is expected to be done: by LEAD times `Engine._making_s`."""

KEPT_LEAD = 0.95
"""Share of `Engine._making_s` that is kept from each step to the next, so that one slow step is forgotten in time."""


class Engine(EngineDrafts):
    """Makes steps of the requests that `EngineRequests` has admitted, and of their drafts, by `EngineDrafts`;
    `EngineTokens` takes what comes of them."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        policy: CheckpointPolicy,
        scheduler: Scheduler,
        victims: VictimPolicy,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        max_model_tokens: int,
        num_blocks: int,
        prior_costs: StepCosts,
        grammars: Grammars,
        overlap: bool,
        clock: Callable[[], float],
        tail_rows: TailRows | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(
            runner,
            cache,
            policy,
            scheduler,
            victims,
            StopRules(tuple(t for t in eos_token_ids if t < vocab_size), max_model_tokens),
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            prior_costs=prior_costs,
            grammars=grammars,
            clock=clock,
            tail_rows=tail_rows,
            drafting=drafting,
        )
        self._builder = StepBuilder(runner, self._rules)
        self._masks = StepMasks(grammars, self._rules.unwanted, runner.new_masks)
        self._client_work = ClientWork()
        self._yielded = NOTHING_YIELDED
        self._overlap = overlap
        self._in_step: list[ScheduledChunk[Sequence]] = []
        self._turn_s = 0.0
        self._making_s = 0.0
        """The longest that making a step has lately taken, until it was launched; waits for tokens are part of it."""
        self.shortages = 0  # steps given up because the device had too little memory

    def step(self) -> bool:
        """Schedules and launches step n+1, takes the tokens of step n, publishes what n+1 writes.

        Without overlap a step's own tokens are taken at once. Returns False if there was nothing to do.
        """
        # Answers wait for a step that is made while the device computes the one before.
        way = self.right_of_way.taken() if self._keeps_answers_waiting else nullcontext()
        try:
            with way:
                return self._step()
        finally:  # whatever raises, tokens that were taken are their request's
            self._report_taken()

    def _step(self) -> bool:
        had_tokens, began_s = self._in_flight is not None, self._clock()
        self._in_step = [] if self._in_flight is None else self._in_flight.chunks
        if self.drafting is not None:
            self._draft(self.drafting)
        chunks = self._schedule()
        self._in_step = [*self._in_step, *chunks]
        self._report_started(chunks)
        launched = self._try_launch(chunks)
        self._making_s = max(self._clock() - began_s, KEPT_LEAD * self._making_s)
        self._count_work(chunks)
        if isinstance(launched, Shortage):
            self._do_without(chunks, launched)
        else:
            previous, self._in_flight = self._in_flight, launched
            if previous is not None:
                self._take_tokens(previous)  # while the new step runs
            if launched is not None:
                self._publish_written(launched)
                if not self._overlap:
                    self._settle()
        self._in_step = []
        return bool(chunks) or had_tokens

    @property
    def _keeps_answers_waiting(self) -> bool:
        """True if answers go on in the step in flight or in the next one: each gets a token late if that is late."""
        if self._in_flight is None:
            return False
        return self._in_flight.shape.num_decoding > 0 or any(
            not sequence.is_prefilling and self._takes_part(sequence) for sequence in self._running
        )

    @property
    def host_share_s(self) -> float:
        """Seconds that commands may take before the next step, and admissions as many; inf if no step is in flight.

        The device computes the step in flight meanwhile. If commands and admissions took longer, the next step would be
        late, for all sequences that decode.
        """
        if self._in_flight is None:
            return math.inf
        return HOST_SHARE * self.cost_fit.costs.seconds(self._in_flight.shape)

    @property
    def spare_s(self) -> float:
        """How long the next step may be left open for prompts to come, so that the device is given it in time.

        None is left open while answers wait for it. Raises what the device does if it has failed.
        """
        step = self._in_flight
        if step is None or self._keeps_answers_waiting or self._is_done(step):
            return 0.0
        done_s = max(step.began_s, self._known_done_s) + self.cost_fit.costs.seconds(step.shape)
        return max(0.0, done_s - LEAD * self._making_s - self._clock())

    def _is_done(self, step: InFlight) -> bool:
        self._in_step = step.chunks  # if the device has failed, one of them may be the cause
        has_arrived = step.launched.drawn.has_arrived
        self._in_step = []
        return has_arrived

    @property
    def has_work(self) -> bool:
        """False if a turn would change nothing; a paused sequence is work if it holds what another one waits for."""
        if (
            self.is_admitting
            or self._in_flight is not None
            or not all(sequence.is_paused for sequence in self._running)
        ):
            return True
        return self._waiting.earliest is not None and self._settled_paused() is not None

    @property
    def suspects(self) -> set[Sequence]:
        """Sequences with a part in the step that is under way, or that raised: one of them may be the cause."""
        return {chunk.sequence for chunk in self._in_step}

    # ------------------------------------------------------------ schedule

    def _schedule(self) -> list[ScheduledChunk[Sequence]]:
        """The next step's chunks, each with blocks and slots for what it writes; preempts requests for them."""
        now_s = self._clock()
        clients = [sequence.request.client for sequence in self._running]
        self._client_work.pass_time(now_s, clients)
        standing = {
            client: (self._client_work.of(client), self._client_work.is_over_share(client)) for client in set(clients)
        }
        for sequence, client in zip(self._running, clients, strict=True):
            sequence.client_work, sequence.is_over_share = standing[client]
        while True:
            ready = (s for s in self._running if self._takes_part(s))
            chunks = self._scheduler.schedule(ready, self.cost_fit.costs, self._yielded)
            if all(self._has_blocks(chunk, len(chunks)) for chunk in chunks):
                break
            if any(chunk.slack for chunk in chunks) and self._settle():
                continue  # fewer may do, and without drafts a step follows known tokens
            if self.drafting is not None and self.drafting.forget():
                continue  # drafts are not worth another request's blocks
            if not self._settle():
                self._preempt(self._settled_paused() or self._victims.victim(self._running))
        self._running = after_turn(self._running, chunks)
        self._publisher.prepare(chunks)
        self._give_tails(chunks)
        for chunk in chunks:
            if num_slots := self._num_draft_slots(chunk.sequence):
                chunk.draft_slots = self.cache.draft_slots.take(num_slots)
        return chunks

    def _has_blocks(self, chunk: ScheduledChunk[Sequence], num_chunks: int) -> bool:
        """Takes the blocks that a chunk needs; False, and no change, if there are too few.

        A chunk with slack takes blocks that it may turn out not to need, so it must leave one for each of the step's.
        """
        num_left = num_chunks if chunk.slack else 0
        return self.cache.extend(chunk.sequence.held, chunk.span.end + chunk.slack, min_blocks_left=num_left)

    def _count_work(self, chunks: list[ScheduledChunk[Sequence]]) -> None:
        """Counts a step's work as its clients'; before its chunks count as computed."""
        for chunk, cost in zip(chunks, self._scheduler.work(chunks, self.cost_fit.costs), strict=True):
            self._client_work.add(chunk.sequence.request.client, cost)
        if any(sequence.is_over_share for sequence in self._running):
            self._yielded = self._yielded.after(chunks, self.cost_fit.costs, self._scheduler.least_row)

    def _give_tails(self, chunks: list[ScheduledChunk[Sequence]]) -> None:
        """Gives each sequence that decodes a tail; for want of rows, others that have one get their states written."""
        if self._tail_rows is None:
            return
        decoding = [chunk for chunk in chunks if not chunk.sequence.is_prefilling]
        num_missing = sum(chunk.sequence.tail is None for chunk in decoding) - self._tail_rows.num_free
        if num_missing > 0:
            in_step = {chunk.sequence for chunk in decoding}
            idle = [sequence for sequence in self._running if sequence.tail is not None and sequence not in in_step]
            # First those whose turn comes last: paused ones, then those that were in the newest step.
            idle = sorted(reversed(idle), key=lambda sequence: not sequence.is_paused)
            self._write_states(idle[:num_missing])
        interval = self._tail_rows.interval
        for chunk in decoding:
            sequence = chunk.sequence
            if sequence.tail is None:
                sequence.tail = Tail(self._tail_rows.take(), sequence.num_computed)
            if chunk.slack:  # what it writes is found with its place
                chunk.tail = sequence.tail
            else:
                chunk.tail = sequence.tail.step(chunk.span, interval)

    def _takes_part(self, sequence: Sequence) -> bool:
        if sequence.is_paused:
            return False
        if sequence.is_prefilling:
            return True
        # It takes another token after a pending one, unless that is a stop token.
        is_pending = self._in_flight is not None and sequence in self._in_flight.inputs.draw_index
        return self._rules.most_new(sequence) > is_pending

    def _report_started(self, chunks: list[ScheduledChunk[Sequence]]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.is_started and sequence.is_prefilling:
                sequence.is_started = True
                sequence.job.on_event(Started())

    # ------------------------------------------------------------ launch

    def _try_launch(self, chunks: list[ScheduledChunk[Sequence]]) -> InFlight | Shortage | None:
        try:
            return self._launch(chunks) if chunks else None
        except (torch.OutOfMemoryError, MemoryError) as error:
            return Shortage(first_line(error))  # not the error itself: it would keep the step's tensors alive

    def _launch(self, chunks: list[ScheduledChunk[Sequence]]) -> InFlight:
        self._runner.keep_rows(self._running)
        pending = {} if self._in_flight is None else self._in_flight.inputs.draw_index
        step = self._builder.build(chunks, pending)
        began_s = self._clock()
        waits_for = None if self._in_flight is None else self._in_flight.end
        # A mask needs the token before it. The device computes meanwhile: only the draws come after the masks.
        settle = self._settle if any(sequence in pending for sequence, _ in step.constrained) else None
        way = self.right_of_way.given() if step.constrained else nullcontext()  # other threads compute masks
        with way, self._masks.computed(step.constrained, settle) as wait_for_masks:
            launched = self._runner.launch(step.inputs, step.draws, step.rows, wait_for_masks)
        passes = None
        if self.drafting is not None and self._overlap:
            parts = zip((chunk.sequence for chunk in chunks), step.inputs, strict=True)
            passes = self.drafting.draft_ahead([*parts], step.draw_index, len(self._running))
        self._give_up_confused(step.constrained)
        # Without overlap none is ever under way, and what the device waits for is part of each step.
        has_waited = self._overlap if waits_for is None else waits_for.has_arrived
        offers = {} if self.drafting is None else self.drafting.offers(chunks)
        return InFlight(
            chunks,
            step,
            offers,
            launched,
            step_shape(chunks),
            began_s,
            end=passes or launched.drawn,
            waits_for=waits_for,
            turn_s=self._turn_s,
            has_waited=has_waited,
            is_probe=self.drafting is not None and self.drafting.is_probe(offers),
        )

    def _give_up_confused(self, constrained: list[WantedMask]) -> None:
        """Gives up sequences whose grammars have no mask: they grew beyond their limits."""
        for sequence in {sequence for sequence, _ in constrained}.intersection(self._running):
            if sequence.grammar is not None and (error := sequence.grammar.error) is not None:
                self._report_taken()
                self._leave(sequence)
                sequence.job.on_event(Failed(BadRequest(f"grammar: the answer cannot go on by it: {error}")))

    # ------------------------------------------------------------ too little memory

    def _do_without(self, chunks: list[ScheduledChunk[Sequence]], shortage: Shortage) -> None:
        """Gives up one request of a step that found too little memory. Some of the step's layers may have run.

        Nothing of the step was published, and it wrote nothing but blocks and states of its own sequences. Their
        blocks and the entries of their tails are written again. A state that was read from one slot and written to
        another is as it was before. A state that was updated in place may have advanced in some layers: its sequence
        is computed again, or given up, too, if its blocks are being sent.
        """
        self._settle()
        if self.drafting is not None:
            self.drafting.forget()
        self._runner.keep_rows(())  # it may have counted tokens that nobody gets
        running = set(self._running)
        in_place = [chunk.sequence for chunk in chunks if chunk.sequence in running and chunk.writes_in_place]
        for chunk in chunks:
            self._publisher.given_up(chunk)
            self.cache.draft_slots.give_back(chunk.draft_slots)
        sequences = [chunk.sequence for chunk in chunks if chunk.sequence in running]
        self.shortages += 1
        if sequences:
            refused = blamed(sequences)
            self._give_up(refused, shortage, NeedsMoreMemory if is_first_prefill(refused) else OutOfMemory)
        for sequence in set(in_place).intersection(self._running):
            if sequence.num_computed == 0:
                continue
            if sequence.job.is_sent:
                self._give_up(sequence, shortage, OutOfMemory)  # not its fault: another node may compute it
            else:
                self._compute_again(sequence)
        with self.right_of_way.given():
            self._runner.free_memory()

    def _give_up(self, sequence: Sequence, shortage: Shortage, kind: type[NeedsMoreMemory] | type[OutOfMemory]) -> None:
        self._leave(sequence)
        what = f"needs more memory than this node has: {shortage.cause}"
        log.error("request %s %s", log_summary(sequence.request), what)
        remedy = "shorten the prompt, or lower engine.max_step_tokens or engine.cache_bytes"
        sequence.job.on_event(Failed(kind(f"a step with these {len(sequence.tokens)} tokens {what}; {remedy}")))
