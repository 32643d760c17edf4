"""The settling of an engine's launched steps: what they write counts as written, and the tokens they drew are taken.

A step is in flight from its launch until its tokens are taken: then it has settled. Tokens are mostly taken, and
reported, after the launch of the next step. If the next step needs them for its drafts, they are taken before its
launch, but still reported after it, because the device has nothing to do until then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from headrace.cache.checkpoints import CheckpointPolicy
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import ScheduledChunk
from headrace.engine.drafts.accepted import append_new, keep_accepted, num_accepted
from headrace.engine.drafts.drafting import Drafting
from headrace.engine.failures import NanLogits, UnprovenPrefix, log_summary
from headrace.engine.requests import EngineRequests
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.logprobs import PromptScores
from headrace.engine.sampling.sampler import Drawn
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.scheduling.scheduler import Scheduler, VictimPolicy
from headrace.engine.sequence import Computed, Failed, Finished, Halted, Sampled, Scored, Sequence
from headrace.engine.step import InFlight, rows_to_score
from headrace.engine.tail_rows import TailRows
from headrace.grammar import Grammars
from headrace.kernels.sampling.argmax import NO_TOKEN
from headrace.request import FinishReason
from headrace.right_of_way import RightOfWay
from headrace.step_costs import StepCosts

log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """Tokens that were appended to a sequence, and that are yet to be reported.

    draws    theirs, among those of their step
    finish   why the last one ends the sequence; None: it does not
    """

    sequence: Sequence
    drawn: Drawn
    draws: slice
    finish: FinishReason | None


class EngineTokens(EngineRequests):
    """The part of an engine that publishes what its steps write and takes their tokens; `Engine` makes the steps."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        policy: CheckpointPolicy,
        scheduler: Scheduler,
        victims: VictimPolicy,
        rules: StopRules,
        *,
        vocab_size: int,
        num_blocks: int,
        prior_costs: StepCosts,
        grammars: Grammars,
        clock: Callable[[], float],
        tail_rows: TailRows | None,
        drafting: Drafting | None,
    ) -> None:
        super().__init__(
            cache,
            policy,
            scheduler,
            victims,
            rules,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            prior_costs=prior_costs,
            record_event=runner.memory.record_event,
            grammars=grammars,
            clock=clock,
            tail_rows=tail_rows,
        )
        self._runner = runner
        self.drafting = drafting
        self.right_of_way = RightOfWay()
        self._in_flight: InFlight | None = None
        self._unreported: list[Taken] = []  # by the order of their steps; none between two turns
        self._known_done_s = 0.0  # when the last step was known to be done
        self.computed_tokens = 0
        self.recomputed_tokens = 0  # of these, computed once before, and lost by a preemption
        self.sampled_tokens = 0
        self.prompt_s = 0.0  # work on prompts, by the node's own costs
        self.nan_requests = 0  # requests given up for want of a next token: the model's logits were NaN

    # ------------------------------------------------------------ what a launched step writes

    def _publish_written(self, step: InFlight) -> None:
        """Counts the launched step's blocks and states as written: later launches run behind it on the device."""
        running = set(self._running)
        for chunk in step.chunks:
            sequence, (start, end) = chunk.sequence, chunk.span
            if sequence not in running:
                self._publisher.given_up(chunk)
                self.cache.draft_slots.give_back(chunk.draft_slots)
                continue  # its last token has come in meanwhile, this one was too many; or its grammar has no mask
            if chunk.slack:
                self._find_place(chunk)
                start, end = chunk.span
            if chunk.num_drafts:
                continue  # how many of its tokens count is known when they are taken
            self.computed_tokens += end - start
            if chunk.draft_slots:  # it was behind drafts
                keep_accepted(chunk, end - start, self.cache, self._publisher)
                self.cache.draft_slots.give_back(chunk.draft_slots)
                continue
            sequence.num_computed = end
            if chunk.tail is not None and chunk.tail.written is not None:
                sequence.tail = chunk.tail.after(end)
            self._publisher.written(chunk)
            if start < sequence.prefill_length:
                self._report_progress(chunk)
            if sequence.job.max_new == 0 and not sequence.is_prefilling and not sequence.to_score:
                self._end(sequence, FinishReason.LENGTH)

    def _find_place(self, chunk: ScheduledChunk[Sequence]) -> None:
        """Places a chunk behind the drafts of a check, whose tokens were taken meanwhile."""
        sequence = chunk.sequence
        chunk.begin_at(sequence.num_computed)
        assert sequence.tail is not None and self._tail_rows is not None
        chunk.tail = sequence.tail.step(chunk.span, self._tail_rows.interval)

    def _report_progress(self, chunk: ScheduledChunk[Sequence]) -> None:
        """Reports the prompt's newly computed tokens; those computed before a preemption are not reported again."""
        sequence, span = chunk.sequence, chunk.span
        self._prompt_tokens += span.end - span.start
        self.recomputed_tokens += max(0, min(span.end, sequence.computed_before) - span.start)
        start, end = max(span.start, sequence.computed_before), min(span.end, sequence.prompt_length)
        if start < end:
            sequence.num_prefilled += end - start
            sequence.job.on_event(Computed(end, self._record_event()))

    # ------------------------------------------------------------ its tokens

    def _settle(self) -> bool:
        """Waits for the tokens in flight, and reports all that were taken; False if none were in flight."""
        was_in_flight = self._in_flight is not None
        self._take_in_flight()
        self._report_taken()
        return was_in_flight

    def _take_in_flight(self) -> None:
        """Waits for the tokens in flight. They are reported behind the next launch."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._take_tokens(step)

    def halt(self, sequence: Sequence) -> None:
        """Takes a decoding sequence out of all steps, with its tokens known and its state written, and reports Halted.

        It keeps its blocks, whoever else needs some. Nothing is reported of a sequence that has ended, or ends now.
        """
        if sequence in self._running and not sequence.is_prefilling:
            self._settle()  # its newest token may be on the device
            if sequence in self._running:
                self._write_states([sequence])
                self._running.remove(sequence)
                self._halted.add(sequence)
                sequence.job.on_event(Halted(Computed(sequence.num_computed, self._record_event())))
        elif sequence in self._running or sequence in self._waiting.preempted:
            sequence.job.on_event(Halted(None))

    def _write_states(self, sequences: list[Sequence]) -> None:
        """Writes their newest states to their slots, behind all that was launched; they have no tails any more.

        Where the device finds no memory for that, they keep their tails.
        """
        behind = [(each, each.tail) for each in sequences if each.tail and each.tail.base < each.num_computed]
        if behind:
            self._runner.write_states(
                [(each.state_slot, each.held.slot, tail, each.num_computed) for each, tail in behind]
            )
        for sequence, _ in behind:
            self.cache.state_written(sequence.held)
        for sequence in sequences:
            self._free_row(sequence)

    def _take_tokens(self, step: InFlight) -> None:
        """Waits for the step's tokens and appends them; sequences that ended or were cancelled get none."""
        running = set(self._running)
        drawn = step.launched.drawn
        with self.right_of_way.given():
            ids = drawn.ids()
        self._note_time(step)
        for chunk, scores in zip(step.inputs.scored, step.launched.scores, strict=True):
            if chunk.sequence in running:
                self._take_scores(chunk, scores)
        if step.inputs.scored:
            running.intersection_update(self._running)  # without those that the scores have ended
        for sequence, draw in step.inputs.draw_index.items():
            if sequence in running and sequence not in step.offers:
                if ids[draw] == NO_TOKEN:
                    self._give_up_nan(sequence)
                    continue
                if not sequence.held.is_proven:
                    self.cache.prove(sequence.held)
                sequence.append(ids[draw])
                finish = self._rules.finish_reason(sequence)
                self._appended(Taken(sequence, drawn, slice(draw, draw + 1), finish))
        if self.drafting is not None:
            self.drafting.steps += step.has_drafts
        for chunk in step.chunks:
            if chunk.num_drafts:
                self._take_verified(chunk, step, ids, chunk.sequence in running)

    def _take_verified(self, chunk: ScheduledChunk[Sequence], step: InFlight, ids: list[int], is_running: bool) -> None:
        """Takes the tokens drawn after a sequence's newest token and its drafts, up to the first that is no draft.

        They are published and appended as if each had come in a step of its own. `ids`: what the step's draws drew.
        """
        sequence, drafts = chunk.sequence, chunk.drafts
        sequence.behind = None
        if sequence.drafts is drafts:  # else these are of the next step, which was launched behind this one
            sequence.drafts = ()
        if is_running:
            first_draw = step.inputs.draw_index[sequence]
            token_ids = ids[first_draw : first_draw + 1 + chunk.num_drafts]
            new = token_ids[: num_accepted(token_ids, drafts) + 1]
            is_lost = NO_TOKEN in new  # perhaps as an accepted draft: the layer drafts it, too
            if is_lost:
                del new[new.index(NO_TOKEN) :]
            if new:
                self._take_new(chunk, step, first_draw, new)
            if is_lost and sequence in self._running:
                self._give_up_nan(sequence)
        if chunk.draft_slots:
            self.cache.draft_slots.give_back(chunk.draft_slots)

    def _take_new(self, chunk: ScheduledChunk[Sequence], step: InFlight, first_draw: int, token_ids: list[int]) -> None:
        """Takes tokens that a check has drawn, accepted drafts among them, up to the one that ends the sequence."""
        sequence = chunk.sequence
        if not sequence.held.is_proven:  # not what this step has written: NaN may stand behind these tokens
            self.cache.prove(sequence.held)
        num_taken, finish = append_new(sequence, token_ids, self._rules)
        keep_accepted(chunk, num_taken, self.cache, self._publisher)
        self.computed_tokens += num_taken
        if num_taken > 1 and sequence.request.sampling.has_penalty:
            self._runner.token_counts.count(sequence, token_ids[1:num_taken])
        draws = slice(first_draw, first_draw + num_taken)
        self._appended(Taken(sequence, step.launched.drawn, draws, finish))
        if self.drafting is not None:
            self.drafting.verified(sequence, step.offers[sequence], num_taken - 1)

    def _give_up_nan(self, sequence: Sequence) -> None:
        """Ends a sequence for which NO_TOKEN was drawn, behind the tokens that it has, or whose scores are NaN.

        Nobody hits what no token was drawn from. If it has reused some of that itself, that may be the cause.
        """
        self._report_taken()
        self._leave(sequence)
        kind = UnprovenPrefix if self.cache.forget_unproven(sequence.held) else NanLogits
        self.nan_requests += 1
        what = f"logits behind {len(sequence.tokens)} tokens are not numbers (NaN)"
        log.error("request %s: %s", log_summary(sequence.request), what)
        remedy = "its activations overflow, or its weights are damaged: try engine.dtype float32 or bfloat16"
        sequence.job.on_event(Failed(kind(f"the model's {what}; {remedy}")))

    def _appended(self, taken: Taken) -> None:
        """Keeps new tokens to be reported, and takes a sequence that needs no more of them out of the steps."""
        sequence = taken.sequence
        self._unreported.append(taken)
        self.sampled_tokens += taken.draws.stop - taken.draws.start
        # At `max_new` a prefill node's part is done: the answer goes on elsewhere.
        if taken.finish is not None or sequence.num_sampled >= sequence.job.max_new:
            self._leave(sequence)

    def _report_taken(self) -> None:
        """Reports the tokens that were taken, and which sequences have ended; nothing of those that were released."""
        unreported, self._unreported = self._unreported, []
        for sequence, drawn, draws, finish in unreported:
            on_event = sequence.job.on_event
            *others, last = drawn.tokens(draws)
            for token in others:
                if sequence.claim is not None:
                    on_event(Sampled(token, None))
            if sequence.claim is not None:
                on_event(Sampled(last, finish))
            if finish is not None and sequence.claim is not None:
                on_event(Finished(finish))

    def _note_time(self, step: InFlight) -> None:
        """Notes that a step is done, and how long it took.

        A step behind another one took the time from the other one's end to its own, as the device has measured: when it
        ended, the host may have been busy with the next launch. Otherwise the host's clock counts, from the launch or
        from the time when the step before was known to be done.
        """
        now_s = self._clock()
        seconds = step.launched.drawn.seconds_after(step.waits_for) if step.waits_for is not None else None
        if seconds is None:
            seconds = now_s - max(step.began_s, self._known_done_s)
        if self.drafting is not None:
            whole_s, is_check = now_s - max(step.turn_s, self._known_done_s), step.shape.num_drafts > 0
            if is_check:
                seconds = whole_s  # drafts also cost the time to make them, and to wait for the tokens before them
            self.drafting.count.took(
                whole_s,
                self.cost_fit.costs.seconds(step.shape),
                has_drafts=is_check,
                has_prompts=step.shape.prefill_tokens > 0,
                is_probe=step.is_probe,
            )
        self._known_done_s = now_s
        self.prompt_s += self.cost_fit.costs.prompt_work_s(step.shape)
        if not step.inputs.scored:  # scoring costs far more than the step's shape says
            self.cost_fit.observe(step.shape, seconds, may_be_late=not step.has_waited)

    def _take_scores(self, chunk: ScheduledChunk[Sequence], scores: PromptScores) -> None:
        sequence = chunk.sequence
        for part in scores.parts():
            if any(map(math.isnan, part.logprobs)):
                self._give_up_nan(sequence)
                return
            sequence.job.on_event(Scored(part))
        sequence.num_scored = rows_to_score(chunk).stop
        if sequence.job.max_new == 0 and not sequence.to_score:
            self._end(sequence, FinishReason.LENGTH)
