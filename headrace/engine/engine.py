"""One node's engine: its step schedules chunks, launches them, and settles the tokens they draw. One thread.

With `overlap`, a step is launched before the tokens of the one before are known: scheduling needs only lengths, and the
runner fills in the drawn tokens on the device, and counts them there for penalties. A sequence that turns out to have
ended has then computed one token too many, which is dropped. What else needs a token's value, hashes and a preemption,
waits for it.

`EngineLoop` (headrace/engine/loop.py) drives it; prefill and decode nodes differ only in the jobs they submit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from headrace.cache.checkpoints import CheckpointPolicy
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import ScheduledChunk
from headrace.engine.accepted_drafts import append_new, keep_accepted, num_right
from headrace.engine.client_work import ClientWork
from headrace.engine.drafting import Drafting
from headrace.engine.failures import NeedsMoreMemory, OutOfMemory, blamed, first_line, is_first_prefill, shape
from headrace.engine.intake import BadRequest
from headrace.engine.load import shape_of
from headrace.engine.logprobs import PromptScores
from headrace.engine.requests import EngineRequests
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Scheduler, VictimPolicy, after_turn
from headrace.engine.sequence import Computed, Failed, Halted, Sampled, Scored, Sequence, Started
from headrace.engine.step import InFlight, Shortage, StepBuilder, drafts_under_way, rows_to_score
from headrace.engine.step_masks import StepMasks, WantedMask
from headrace.engine.stopping import StopRules
from headrace.engine.yielding import NOTHING_YIELDED
from headrace.grammar import Grammars
from headrace.request import FinishReason, Token
from headrace.step_costs import StepCosts

log = logging.getLogger(__name__)

HOST_SHARE = 1 / 8
"""Share of a step's time that commands may take beside it, and admissions as much: launching the next takes a third."""


class Engine(EngineRequests):
    """Runs steps of the requests that `EngineRequests` has admitted; their jobs receive the events."""

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
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(
            cache,
            policy,
            scheduler,
            victims,
            StopRules(tuple(t for t in eos_token_ids if t < vocab_size), max_model_tokens),
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            prior_costs=prior_costs,
            record_event=runner.memory.record_event,
            grammars=grammars,
            clock=clock,
        )
        self._runner = runner
        self._builder = StepBuilder(runner, self._rules)
        self._masks = StepMasks(grammars, self._rules.unwanted, runner.new_masks)
        self._client_work = ClientWork()
        self._yielded = NOTHING_YIELDED
        self._overlap = overlap
        self.drafting = drafting
        self._in_flight: InFlight | None = None
        self._in_step: list[ScheduledChunk[Sequence]] = []
        self._known_done_s = 0.0  # when the last step was known to be done
        self._turn_s = 0.0  # when the step that is being made began; noted for drafts alone
        self.shortages = 0  # steps given up because the device had too little memory
        self.computed_tokens = 0
        self.recomputed_tokens = 0  # of these, computed once before, and lost by a preemption
        self.sampled_tokens = 0

    def step(self) -> bool:
        """Schedules and launches step n+1, takes the tokens of step n, publishes what n+1 writes.

        Without overlap a step's own tokens are taken at once. Returns False if there was nothing to do.
        """
        had_tokens = self._in_flight is not None
        self._in_step = [] if self._in_flight is None else self._in_flight.chunks
        if self.drafting is not None:
            self._draft(self.drafting)
        chunks = self._schedule()
        self._in_step = [*self._in_step, *chunks]
        self._report_started(chunks)
        launched = self._try_launch(chunks)
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
    def host_share_s(self) -> float:
        """How long commands, and how long admissions, may take before the next step; any time if none is in flight.

        Beyond what the device computes meanwhile they would make the next step late, for all that decode.
        """
        if self._in_flight is None:
            return math.inf
        return HOST_SHARE * self.cost_fit.costs.seconds(self._in_flight.shape)

    @property
    def has_work(self) -> bool:
        """False if a turn would change nothing; a paused sequence is work if it holds what another one waits for."""
        if (
            self._is_admitting
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

    def _draft(self, drafting: Drafting) -> None:
        """Has the sequences that decode draft for the next step.

        A draft follows known tokens: where one is likely, they settle first. So they do behind a step with drafts:
        how many of them count decides what is computed next.
        """
        now_s, fit = self._clock(), self.cost_fit
        self._turn_s = now_s
        if self._in_flight is not None and self._in_flight.has_drafts:
            self._settle()
            self._in_step = []
            now_s = self._clock()
        drafting.forget()
        if self._in_flight is not None:
            would_draft = drafting.would_draft(self._running, self._in_flight.inputs.draw_index, fit, now_s)
            drafting.seconds += self._clock() - now_s
            if not would_draft:
                return
            self._settle()
            self._in_step = []
            now_s = self._clock()
        drafting.propose(self._running, fit, now_s)
        drafting.seconds += self._clock() - now_s

    def _schedule(self) -> list[ScheduledChunk[Sequence]]:
        """The next step's chunks, each with blocks and slots for what it writes; preempts requests for them."""
        now_s = self._clock()
        clients = [sequence.request.client for sequence in self._running]
        self._client_work.pass_time(now_s, clients)
        standing = {
            client: (self._client_work.of(client), self._client_work.exceeds(client)) for client in set(clients)
        }
        for sequence, client in zip(self._running, clients, strict=True):
            sequence.client_work, sequence.exceeds = standing[client]
        while True:
            ready = (s for s in self._running if self._takes_part(s))
            chunks = self._scheduler.schedule(ready, self.cost_fit.costs, self._yielded)
            if all(self.cache.extend(chunk.sequence.held, chunk.span.end) for chunk in chunks):
                break
            if self.drafting is not None and self.drafting.forget():
                continue  # drafts are not worth another request's blocks
            if not self._settle():
                self._preempt(self._settled_paused() or self._victims.victim(self._running))
        for chunk, cost in zip(chunks, self._scheduler.work(chunks, self.cost_fit.costs), strict=True):
            self._client_work.add(chunk.sequence.request.client, cost)
        if any(exceeds for _, exceeds in standing.values()):
            self._yielded = self._yielded.after(chunks, self.cost_fit.costs, self._scheduler.least_row)
        self._running = after_turn(self._running, chunks)
        self._publisher.prepare(chunks)
        if self.drafting is not None:
            for chunk in chunks:
                chunk.draft_slots = self.cache.draft_slots.take(_num_drafts(chunk))
        return chunks

    def _takes_part(self, sequence: Sequence) -> bool:
        if sequence.is_paused:
            return False
        return sequence.is_prefilling or self._rules.wants_more(sequence, self._num_pending(sequence))

    def _num_pending(self, sequence: Sequence) -> int:
        return int(self._in_flight is not None and sequence in self._in_flight.inputs.draw_index)

    def _report_started(self, chunks: list[ScheduledChunk[Sequence]]) -> None:
        for sequence in (chunk.sequence for chunk in chunks):
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
        step = self._builder.build(chunks, {} if self._in_flight is None else self._in_flight.inputs.draw_index)
        began_s = self._clock()
        behind = drafts_under_way(chunks) if self._in_flight is None else self._in_flight.launched.drawn
        # A mask needs the token before it. The device computes meanwhile: only the draws come after the masks.
        settle = self._settle if any(self._num_pending(sequence) for sequence, _ in step.constrained) else None
        with self._masks.computed(step.constrained, settle) as wait_for_masks:
            launched = self._runner.launch(step.inputs, step.draws, step.rows, wait_for_masks)
        if self.drafting is not None and self._overlap:
            parts = zip((chunk.sequence for chunk in chunks), step.inputs, strict=True)
            self.drafting.draft_ahead([*parts], step.draw_index, len(self._running))
        self._give_up_confused(step.constrained)
        has_waited = behind is not None and behind.has_arrived
        return InFlight(chunks, step, launched, shape_of(chunks), began_s, behind, self._turn_s, has_waited)

    def _give_up_confused(self, constrained: list[WantedMask]) -> None:
        """Gives up sequences whose grammars have no mask: they grew beyond their limits."""
        for sequence in {sequence for sequence, _ in constrained}.intersection(self._running):
            if sequence.grammar is not None and (error := sequence.grammar.error) is not None:
                self._running.remove(sequence)
                sequence.job.on_event(Failed(BadRequest(f"grammar: the answer cannot go on by it: {error}")))

    def _publish_written(self, step: InFlight) -> None:
        """Counts the launched step's blocks and states as written: later launches run behind it on the device."""
        running = set(self._running)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence not in running:
                self._publisher.given_up(chunk)
                continue  # its last token has come in meanwhile, this one was too many; or its grammar has no mask
            if chunk.draft_slots:
                continue  # how many of its tokens count is known when they are taken
            sequence.num_computed = chunk.span.end
            self._publisher.written(chunk)
            self._report_progress(chunk)
            if not sequence.is_prefilling and sequence.job.max_new == 0 and not sequence.to_score:
                self._end(sequence, FinishReason.LENGTH)

    def _report_progress(self, chunk: ScheduledChunk[Sequence]) -> None:
        """Reports the prompt's newly computed tokens; those computed before a preemption are not reported again."""
        sequence, span = chunk.sequence, chunk.span
        self.computed_tokens += span.end - span.start
        if span.start >= sequence.prefill_length:
            return  # a new token of the answer, as most
        self._prompt_tokens += span.end - span.start
        self.recomputed_tokens += max(0, min(span.end, sequence.computed_before) - span.start)
        start, end = max(span.start, sequence.computed_before), min(span.end, sequence.prompt_length)
        if start < end:
            sequence.num_prefilled += end - start
            sequence.job.on_event(Computed(end, self._record_event()))

    # ------------------------------------------------------------ too little memory

    def _do_without(self, chunks: list[ScheduledChunk[Sequence]], shortage: Shortage) -> None:
        """Gives one request up for a step that found too little memory, whose layers may have run in part.

        Nothing of the step was published, and it wrote nothing but blocks and states of its own sequences. Their
        blocks are written again. A state that was read from another slot than it was written to is as it was before;
        one that was updated in place may have advanced in some layers, so that its sequence is computed again.
        """
        self._settle()
        if self.drafting is not None:
            self.drafting.forget()
        self._runner.keep_rows(())  # it may have counted tokens that nobody gets
        running = set(self._running)
        for chunk in chunks:
            self._publisher.given_up(chunk)
            self.cache.draft_slots.give_back(chunk.draft_slots)
        sequences = [chunk.sequence for chunk in chunks if chunk.sequence in running]
        self.shortages += 1
        if sequences:
            refused = blamed(sequences)
            self._give_up(refused, shortage, NeedsMoreMemory if is_first_prefill(refused) else OutOfMemory)
        for sequence in set(sequences).intersection(self._running):
            if sequence.num_computed == 0 or sequence.held.source is not None:
                continue
            if sequence.job.is_sent:
                self._give_up(sequence, shortage, OutOfMemory)  # not its fault: another node may compute it
            else:
                self._compute_again(sequence)
        self._runner.free_memory()

    def _give_up(self, sequence: Sequence, shortage: Shortage, kind: type[NeedsMoreMemory] | type[OutOfMemory]) -> None:
        self._running.remove(sequence)
        what = f"needs more memory than this node has: {shortage.cause}"
        log.error("request %s %s", shape(sequence.request), what)
        remedy = "shorten the prompt, or lower engine.max_step_tokens or engine.cache_bytes"
        sequence.job.on_event(Failed(kind(f"a step with these {len(sequence.tokens)} tokens {what}; {remedy}")))

    # ------------------------------------------------------------ settle

    def _settle(self) -> bool:
        """Waits for the tokens in flight; False if there are none."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return False
        self._take_tokens(step)
        return True

    def halt(self, sequence: Sequence) -> None:
        """Takes a decoding sequence out of all steps, with its tokens known and its state written, and reports Halted.

        It keeps its blocks, whoever else needs some. Nothing is reported of a sequence that has ended, or ends now.
        """
        if sequence in self._running and not sequence.is_prefilling:
            self._settle()  # its newest token may be on the device
            if sequence in self._running:
                self._running.remove(sequence)
                self._halted.add(sequence)
                sequence.job.on_event(Halted(Computed(sequence.num_computed, self._record_event())))
        elif sequence in self._running or sequence in self._waiting.preempted:
            sequence.job.on_event(Halted(None))

    def _take_tokens(self, step: InFlight) -> None:
        """Waits for the step's tokens and appends them; sequences that ended or were cancelled get none."""
        running = set(self._running)
        tokens = step.launched.drawn.tokens()
        self._note_time(step)
        for chunk, scores in zip(step.inputs.scored, step.launched.scores, strict=True):
            if chunk.sequence in running:
                self._take_scores(chunk, scores)
        for sequence, draw in step.inputs.draw_index.items():
            if sequence in running and not sequence.drafts:
                _, finish = append_new(sequence, [tokens[draw].id], self._rules)
                self._report_tokens(sequence, [tokens[draw]], finish)
        if step.has_drafts:
            for chunk in step.chunks:
                if chunk.draft_slots:
                    first = step.inputs.draw_index[chunk.sequence]
                    self._take_verified(chunk, tokens[first : first + 1 + len(chunk.draft_slots)])

    def _report_tokens(self, sequence: Sequence, tokens: list[Token], finish: FinishReason | None) -> None:
        """Reports tokens that were appended, unless whoever gets one releases the sequence; the last may end it."""
        self.sampled_tokens += len(tokens)
        for number, token in enumerate(tokens, 1):
            if sequence.claim is None:
                return
            sequence.job.on_event(Sampled(token, finish if number == len(tokens) else None))
        if finish is not None:
            self._end(sequence, finish)
        elif sequence.num_sampled >= sequence.job.max_new:
            self._running.remove(sequence)  # a prefill node's part is done, the answer continues elsewhere

    def _take_verified(self, chunk: ScheduledChunk[Sequence], tokens: list[Token]) -> None:
        """Takes the tokens drawn after a sequence's newest token and its drafts, up to the first that is no draft.

        They are published and appended as if each had come in a step of its own.
        """
        sequence, drafts = chunk.sequence, chunk.sequence.drafts
        sequence.drafts = ()
        num_taken = 0
        if sequence in self._running:
            token_ids = [token.id for token in tokens]
            num_taken, finish = append_new(sequence, token_ids[: num_right(token_ids, drafts) + 1], self._rules)
            keep_accepted(chunk, num_taken, self.cache, self._publisher)
            self.computed_tokens += num_taken
            if num_taken > 1 and sequence.request.sampling.has_penalty:
                self._runner.token_counts.count(sequence, token_ids[1:num_taken])
            self._report_tokens(sequence, tokens[:num_taken], finish)
        self.cache.draft_slots.give_back(chunk.draft_slots)
        if self.drafting is not None:
            self.drafting.verified(sequence, len(drafts), max(0, num_taken - 1))

    def _note_time(self, step: InFlight) -> None:
        """Notes that a step is done. Behind another one it took the time since that was.

        That is the device's time: the host may have been launching the next step when it ended.
        """
        now_s = self._clock()
        seconds = step.launched.drawn.seconds_after(step.behind) if step.behind is not None else None
        if seconds is None:
            seconds = now_s - max(step.began_s, self._known_done_s)
        if self.drafting is not None:
            whole_s = now_s - max(step.turn_s, self._known_done_s)
            if step.has_drafts:
                seconds = whole_s  # making drafts and waiting for tokens are part of what they cost
            self.drafting.count.took(
                whole_s,
                self.cost_fit.costs.seconds(step.shape),
                has_drafts=step.has_drafts,
                has_prompts=step.shape.prefill_tokens > 0,
            )
        self._known_done_s = now_s
        if not step.inputs.scored:  # scoring costs far more than the step's shape says
            self.cost_fit.observe(step.shape, seconds, may_be_late=not step.has_waited)

    def _take_scores(self, chunk: ScheduledChunk[Sequence], scores: PromptScores) -> None:
        sequence = chunk.sequence
        for part in scores.parts():
            sequence.job.on_event(Scored(part))
        sequence.num_scored = rows_to_score(chunk).stop
        if sequence.job.max_new == 0 and not sequence.to_score:
            self._end(sequence, FinishReason.LENGTH)


def _num_drafts(chunk: ScheduledChunk[Sequence]) -> int:
    return 0 if chunk.sequence.is_prefilling else len(chunk.sequence.drafts)
