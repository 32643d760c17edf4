"""One node's engine: admits jobs into the cache, runs steps, samples, publishes. Synchronous, one thread.

`EngineLoop` (engine/loop.py) drives it; prefill and decode nodes differ only in the jobs they submit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cache.checkpoints import CheckpointPolicy, PromptFacts
from cache.hashing import PrefixHasher
from cache.leases import Leases
from cache.prefix_cache import PrefixCache
from cache.types import SlotId
from engine.batch import SequenceStep
from engine.runner import ModelRunner
from engine.sampler import Draw, sample, score
from engine.scheduler import Planned, Scheduler
from engine.sequence import Admitted, Computed, Finished, Job, Refused, Sampled, Scored, Sequence
from wire.messages import FinishReason, Request, Token


class BadRequest(ValueError):
    """No node of this model can serve the request; the message says why."""


class RequestTooLarge(BadRequest):
    """The request can never fit this node; the message says what it needs and what there is."""


@dataclass(frozen=True)
class _Step:
    planned: Planned
    emit: tuple[tuple[int, SlotId], ...]  # inside the chunk: (num_tokens, slot)
    keep_end: bool  # a checkpoint is wanted where the chunk ends


class Engine:
    """Everything between a job and its events. `clock` gives seconds; deadlines of jobs are on it."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        policy: CheckpointPolicy,
        scheduler: Scheduler,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        max_model_tokens: int,
        num_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self.cache = cache
        self._policy = policy
        self._scheduler = scheduler
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._vocab_size = vocab_size
        self._max_model_tokens = max_model_tokens
        self._num_blocks = num_blocks
        self._clock = clock
        self._leases = Leases(clock)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.computed_tokens = 0
        self.sampled_tokens = 0

    # ------------------------------------------------------------ jobs

    def sequence(self, job: Job) -> Sequence:
        """What `submit` takes: hashed, and known to fit. Touches nothing shared, so any thread may call it.

        Raises BadRequest if the model does not know its tokens, RequestTooLarge if it could never be admitted.
        """
        request = job.request
        self._require_known_tokens(request)
        needed = -(-self._last_token(job) // self.cache.block_size)
        if len(request.tokens) > self._max_model_tokens:
            raise RequestTooLarge(
                f"{len(request.tokens)} tokens > {self._max_model_tokens}, the model's length: shorten the prompt"
            )
        if needed > self._num_blocks:
            raise RequestTooLarge(
                f"prompt and max_tokens need {needed} blocks of {self.cache.block_size} tokens, the node has "
                f"{self._num_blocks}: lower max_tokens, or raise cache_bytes"
            )
        hasher = PrefixHasher(self.cache.block_size, request.salt)
        hasher.extend(request.tokens)
        return Sequence(job, hasher, list(request.tokens))

    def _require_known_tokens(self, request: Request) -> None:
        """What the model has no row for would end the step, and with it the node."""
        if not request.tokens:
            raise BadRequest("the prompt has no tokens: give at least one")
        largest = max((*request.tokens, *request.sampling.stop_token_ids))
        if largest >= self._vocab_size:
            raise BadRequest(f"token id {largest} is outside the model's vocabulary of {self._vocab_size}")

    def submit(self, sequence: Sequence) -> None:
        """Queues a job for admission; from here on `release` gives back what it holds."""
        self._waiting.append(sequence)

    def run_decode(self, sequence: Sequence, first_token: int) -> None:
        """All blocks and the state of the prompt have landed: decode goes on after `first_token`."""
        sequence.num_computed = sequence.prompt_length
        self.cache.publish_blocks(sequence.held, sequence.hasher.keys, sequence.num_computed)
        self._keep_decoded(sequence)
        self._append(sequence, first_token)
        self._running.append(sequence)
        finish = self._finish_reason(sequence, first_token)
        if finish is not None:
            self._end(sequence, finish)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends it now, with its blocks and checkpoints published; the claim is held until `release`."""
        if sequence in self._running:
            self._running.remove(sequence)
            sequence.job.on_event(Finished(reason))

    def release(self, sequence: Sequence) -> None:
        """Gives back all it holds, in whatever phase it is; nothing if it holds nothing (any more)."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.lease is not None:
            self._leases.release(sequence.lease)  # which comes back here, without the lease
        elif sequence.claim is not None:
            self.cache.release(sequence.claim)
            sequence.claim = None

    def _expired(self, sequence: Sequence) -> None:
        sequence.lease = None
        self.release(sequence)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def lease(self, sequence: Sequence, deadline_s: float) -> None:
        """Keeps what a finished prefill holds until `release`, but not beyond `deadline_s`."""
        sequence.lease = self._leases.grant(lambda: self._expired(sequence), deadline_s=deadline_s)

    # ------------------------------------------------------------ steps

    def admit(self) -> None:
        """Admits waiting jobs in order while there is room; refuses those whose deadline has passed."""
        now_s = self._clock()
        self._leases.expire(now_s)
        for late in [s for s in self._waiting if s.job.admit_by_s <= now_s]:
            self._waiting.remove(late)
            late.job.on_event(Refused("no room in the cache before the deadline: retry later, or add nodes"))
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()

    def next_deadline_s(self) -> float | None:
        """When `admit` has something to refuse; None if nothing waits."""
        return min((s.job.admit_by_s for s in self._waiting), default=None)

    def step(self) -> bool:
        """Runs one step. False if no sequence was ready."""
        steps = [self._prepare(planned) for planned in self._scheduler.plan(self._running)]
        if not steps:
            return False
        logits = self._runner.forward([self._sequence_step(step) for step in steps])
        drawing: list[tuple[Sequence, int]] = []
        row = 0
        for step in steps:
            sequence, span = step.planned.sequence, step.planned.span
            rows = self._num_logits(step.planned)
            scores = sequence.is_prefilling and sequence.job.prompt_logprobs is not None
            self._written(step)
            if scores:
                self._score(sequence, logits[row : row + rows], span.start)
            row += rows
            if sequence.is_prefilling:
                continue
            if sequence.job.max_new > 0:
                drawing.append((sequence, row - 1))
            else:
                self._end(sequence, FinishReason.LENGTH)
        self._sample(logits, drawing)
        return True

    # ------------------------------------------------------------ pieces of a step

    def _admit(self, sequence: Sequence) -> bool:
        job, keys, length = sequence.job, sequence.hasher.keys, sequence.prompt_length
        policy = job.hit_policy(self.cache.match(keys, max_tokens=length - 1))
        # A prompt that is to be scored needs the logits of all its tokens: nothing of it is skipped.
        limit = policy.reuse_limit(length) if job.prompt_logprobs is None else 0
        claim = self.cache.claim(
            keys, num_tokens=self._last_token(job), hit_policy=policy, max_reuse_tokens=limit
        )
        if claim is None:
            return False
        sequence.claim = claim
        if not policy.state_arrives:
            sequence.num_computed = claim.reused_tokens
            self._running.append(sequence)
        job.on_event(Admitted(claim.hit, claim.reused_tokens, policy.state_arrives))
        return True

    def _last_token(self, job: Job) -> int:
        return min(len(job.request.tokens) + max(job.max_new - 1, 0), self._max_model_tokens)

    def _prepare(self, planned: Planned) -> _Step:
        sequence, span = planned.sequence, planned.span
        if not sequence.is_prefilling:
            return _Step(planned, (), False)
        facts = PromptFacts(
            sequence.prompt_length, self.cache.block_size, sequence.request.boundaries, sequence.held.junction
        )
        boundaries = self._policy.prompt_boundaries(span, facts)
        emit = []
        for boundary in boundaries:
            # Without a slot the prompt goes on without this checkpoint.
            if boundary < span.end and (slot := self.cache.reserve_slot()) is not None:
                emit.append((boundary, slot))
        return _Step(planned, tuple(emit), span.end in boundaries)

    def _sequence_step(self, step: _Step) -> SequenceStep:
        sequence, span = step.planned.sequence, step.planned.span
        claim = sequence.held
        return SequenceStep(
            tokens=sequence.tokens[span.start : span.end],
            start=span.start,
            block_ids=claim.block_ids,
            src_slot=sequence.state_slot if span.start else None,
            dst_slot=claim.slot,
            emit=step.emit,
            num_logits=self._num_logits(step.planned),
        )

    def _num_logits(self, planned: Planned) -> int:
        sequence, span = planned.sequence, planned.span
        if sequence.job.prompt_logprobs is not None and sequence.is_prefilling:
            return span.end - span.start
        return int(span.end >= sequence.prompt_length and sequence.job.max_new > 0)

    def _written(self, step: _Step) -> None:
        """The step has written blocks and states: publish what is complete."""
        sequence, span = step.planned.sequence, step.planned.span
        claim, keys, size = sequence.held, sequence.hasher.keys, self.cache.block_size
        was_prefilling = sequence.is_prefilling
        self.cache.state_written(claim)
        sequence.num_computed = span.end
        self.computed_tokens += span.end - span.start
        self.cache.publish_blocks(claim, keys, span.end)
        for boundary, slot in step.emit:
            if self.cache.publish_checkpoint(keys[boundary // size - 1], boundary, slot) is not None:
                sequence.checkpoints.append(boundary)
        if step.keep_end and self.cache.donate_running(claim, keys[span.end // size - 1], span.end):
            sequence.checkpoints.append(span.end)
        if was_prefilling:
            sequence.num_prefilled += span.end - span.start
            sequence.job.on_event(Computed(span.end))
        else:
            self._keep_decoded(sequence)

    def _keep_decoded(self, sequence: Sequence) -> None:
        """Past the prompt, the policy keeps boundaries; a newer one may supersede the request's older ones."""
        num_tokens, size = sequence.num_computed, self.cache.block_size
        if num_tokens % size or not self._policy.decoded_boundary(num_tokens, size):
            return
        # First, so that the newer one finds room.
        for old in list(self._policy.superseded(sequence.decoded)):
            self.cache.unpublish(old)
            sequence.decoded.remove(old)
        claim, key = sequence.held, sequence.hasher.keys[num_tokens // size - 1]
        if self.cache.donate_running(claim, key, num_tokens):
            assert claim.source is not None, "a donated state is what the claim reads next"
            sequence.decoded.append(claim.source)

    def _score(self, sequence: Sequence, logits: Tensor, start: int) -> None:
        """Row i of logits predicts the prompt's token start + i + 1; nothing predicts its first."""
        prompt, num_top = sequence.request.tokens, sequence.job.prompt_logprobs
        assert num_top is not None
        if start == 0:
            sequence.scored.append(Token(prompt[0]))
        targets = prompt[start + 1 : start + 1 + logits.shape[0]]
        sequence.scored.extend(score(logits[: len(targets)], targets, num_top))
        if not sequence.is_prefilling:
            sequence.job.on_event(Scored(tuple(sequence.scored)))

    def _sample(self, logits: Tensor, drawing: list[tuple[Sequence, int]]) -> None:
        if not drawing:
            return
        draws = [self._draw(sequence) for sequence, _ in drawing]
        tokens = sample(logits[[row for _, row in drawing]], draws)
        self.sampled_tokens += len(tokens)
        for (sequence, _), token in zip(drawing, tokens, strict=True):
            self._append(sequence, token.id)
            finish = self._finish_reason(sequence, token.id)
            sequence.job.on_event(Sampled(token, finish))
            if finish is not None:
                self._end(sequence, finish)
            elif sequence.num_sampled >= sequence.job.max_new:
                self._running.remove(sequence)  # a prefill node's share is done, the answer goes on elsewhere

    def _draw(self, sequence: Sequence) -> Draw:
        sampling = sequence.request.sampling
        too_early = sequence.num_output < sampling.min_tokens
        banned = self._stop_ids(sequence) if too_early else ()
        return Draw(sampling, sequence.tokens, sequence.request.num_prompt_tokens, banned)

    def _stop_ids(self, sequence: Sequence) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        return sampling.stop_token_ids if sampling.ignore_eos else (*self._eos, *sampling.stop_token_ids)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token_id in self._stop_ids(sequence) and sequence.num_output >= sampling.min_tokens:
            return FinishReason.STOP
        if sequence.num_output >= sampling.max_tokens or len(sequence.tokens) >= self._max_model_tokens:
            return FinishReason.LENGTH
        return None

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.tokens.append(token_id)
        sequence.hasher.extend([token_id])
        sequence.num_sampled += 1

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._running.remove(sequence)
        sequence.job.on_event(Finished(reason))
