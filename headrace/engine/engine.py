"""One node's engine: admits jobs into the cache, runs steps, samples, publishes. One thread.

A claim covers the tokens that are there and grows with the answer. When a running request finds no block to
grow by, the victim policy's choice is preempted: what it has computed stays findable in the cache as long as
it can, its claim goes back, and it is admitted again before any new request.

With `overlap`, a step is launched before the tokens of the one before are known: lengths say what runs next, and
the runner feeds the tokens on the device. A sequence that turns out to have ended has then computed one token too
many, which is dropped. Whatever else needs a token's value (hashes, penalties, a preemption) waits for it.

`EngineLoop` (headrace/engine/loop.py) drives it; prefill and decode nodes differ only in the jobs they submit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from torch import Tensor

from headrace.cache.checkpoints import CheckpointPolicy, ChunkSpan
from headrace.cache.hashing import PrefixHasher
from headrace.cache.leases import Leases
from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.answer import AnswerRules
from headrace.engine.in_flight import InFlight
from headrace.engine.preemption import VictimPolicy
from headrace.engine.publishing import Publisher, Share
from headrace.engine.runner import ModelRunner
from headrace.engine.sampler import Draw, score
from headrace.engine.scheduler import Planned, Scheduler, after_turn
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Job, Sampled, Scored, Sequence
from headrace.engine.waiting import WaitingLine
from headrace.forward.sequence_step import SequenceStep
from headrace.request import FinishReason, Request, Token

HEADROOM_BLOCKS = 1  # claimed beyond the tokens that are there: most answers' first steps need no growth
FUTURE_TOKEN = 0  # in the place of a token whose value is still on the device


class BadRequest(ValueError):
    """No node of this model can serve the request; the message says why."""


class RequestTooLarge(BadRequest):
    """The request can never fit this node; the message says what it needs and what there is."""


class Engine:
    """Everything between a job and its events. `clock` gives seconds; deadlines of jobs are on it."""

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
        overlap: bool,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._overlap = overlap
        self._in_flight: InFlight | None = None  # launched, and its tokens are not known yet
        self.cache = cache
        self._publisher = Publisher(cache, policy)
        self._scheduler = scheduler
        self._victims = victims
        self._rules = AnswerRules(tuple(t for t in eos_token_ids if t < vocab_size), max_model_tokens)
        self._vocab_size = vocab_size
        self._max_model_tokens = max_model_tokens
        self._num_blocks = num_blocks
        self._clock = clock
        self.leases = Leases(clock)
        self._arrivals = count()
        self._waiting = WaitingLine()
        self._running: list[Sequence] = []  # first those that have waited longest for a step
        self._expecting: set[Sequence] = set()  # admitted, and their state has yet to arrive
        self.computed_tokens = 0
        self.recomputed_tokens = 0  # of these, what had been computed before a preemption
        self.preemptions = 0
        self.sampled_tokens = 0

    # ------------------------------------------------------------ jobs

    def sequence(self, job: Job) -> Sequence:
        """What `submit` takes: hashed, and known to fit. Touches nothing shared, so any thread may call it.

        Raises BadRequest if it has tokens behind the model's last, RequestTooLarge if it could never be admitted. No
        message carries a token below zero: of one that was made here, hashing raises BadTokens.
        """
        request = job.request
        self._require_known_tokens(request)
        if len(request.tokens) > self._max_model_tokens:
            raise RequestTooLarge(
                f"{len(request.tokens)} tokens > {self._max_model_tokens}, the model's length: shorten the prompt"
            )
        hasher = PrefixHasher(self.cache.block_size, request.salt)
        hasher.extend(request.tokens)
        sequence = Sequence(job, hasher, list(request.tokens))
        needed = -(-self._rules.last_computed(sequence) // self.cache.block_size)
        if needed > self._num_blocks:
            raise RequestTooLarge(
                f"prompt and max_tokens need {needed} blocks of {self.cache.block_size} tokens, the node has "
                f"{self._num_blocks}: lower max_tokens, or raise cache_bytes"
            )
        return sequence

    def _require_known_tokens(self, request: Request) -> None:
        """What the model has no row for would end the step, and with it the node."""
        if not request.tokens:
            raise BadRequest("the prompt has no tokens: give at least one")
        largest = max(max(request.tokens), max(request.sampling.stop_token_ids, default=0))
        if largest >= self._vocab_size:
            raise BadRequest(f"token id {largest} is outside the model's vocabulary of {self._vocab_size}")

    def submit(self, sequence: Sequence) -> None:
        """Queues a job for admission; from here on `release` gives back what it holds."""
        sequence.arrival = next(self._arrivals)
        self._waiting.join(sequence)

    def run_decode(self, sequence: Sequence, first_token: int) -> None:
        """All blocks and the state of the prompt have landed: decode goes on after `first_token`."""
        self._expecting.discard(sequence)
        sequence.num_computed = sequence.prompt_length
        self._publisher.publish_blocks(sequence)
        self._publisher.keep_decoded(sequence)
        self._append(sequence, first_token)
        self._running.append(sequence)
        finish = self._rules.finish_reason(sequence)
        if finish is not None:
            self._end(sequence, finish)

    def resume(self, sequence: Sequence, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens and the state there have landed: the rest is prefilled.

        That state becomes a checkpoint, as if it had been decoded here. Nothing is done if the sequence's
        lease has run out meanwhile: it holds nothing any more.
        """
        if sequence.claim is None:
            return
        self._expecting.discard(sequence)
        sequence.num_computed = num_tokens
        self._publisher.publish_blocks(sequence)
        self._publisher.keep_received(sequence)
        self._running.append(sequence)

    def compute_instead(self, sequence: Sequence) -> None:
        """The state that it waits for will not come: it is admitted again, before any new request, and prefills.

        Nothing is done if its lease has run out meanwhile: it holds nothing any more.
        """
        if sequence.claim is None:
            return
        self._expecting.discard(sequence)
        self.cache.release(sequence.claim)
        sequence.claim = None
        sequence.compute_instead()
        self._waiting.put_back(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends it now, with its blocks and checkpoints published; the claim is held until `release`."""
        if sequence in self._running:
            self._end(sequence, reason)
        elif sequence in self._waiting.preempted:
            self._waiting.leave(sequence)
            sequence.job.on_event(Finished(reason))

    def release(self, sequence: Sequence) -> None:
        """Gives back all it holds, in whatever phase it is; nothing if it holds nothing (any more)."""
        self._waiting.leave(sequence)
        self._expecting.discard(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.lease is not None:
            self.leases.release(sequence.lease)  # which comes back here, without the lease
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
        sequence.lease = self.leases.grant(lambda: self._expired(sequence), deadline_s=deadline_s)

    # ------------------------------------------------------------ steps

    def admit(self) -> None:
        """Admits waiting jobs in order while there is room; refuses those whose deadline has passed."""
        now_s = self._clock()
        self.leases.expire(now_s)
        for late in self._waiting.expire(now_s):
            late.job.on_event(AdmissionTimedOut("no room in the cache before the deadline: retry later, or add nodes"))
        while (sequence := self._waiting.first()) is not None and self._admit(sequence):
            self._waiting.leave(sequence)

    def next_deadline_s(self) -> float | None:
        """When `admit` has something to refuse; None if it never will."""
        return self._waiting.next_deadline_s()

    def step(self) -> bool:
        """Launches a step and takes in the tokens of the one before; without overlap, its own at once.

        False if there was nothing to do.
        """
        if self._in_flight is not None and not self._in_flight.may_wait:
            self._settle()
        shares = self._publisher.prepare(self._plan())
        before, self._in_flight = self._in_flight, self._launch(shares) if shares else None
        if before is not None:
            self._receive(before)  # while the new one runs
        if self._in_flight is not None:
            self._account(self._in_flight)
            if not self._overlap:
                self._settle()
        return bool(shares) or before is not None

    def _launch(self, shares: list[Share]) -> InFlight:
        drawing: list[Sequence] = []
        draws: list[tuple[int, Draw]] = []
        num_rows = 0
        for share in shares:
            sequence = share.planned.sequence
            num_rows += self._num_logits(share.planned)
            if share.planned.span.end >= sequence.prefill_length and sequence.job.max_new > 0:
                drawing.append(sequence)
                draws.append((num_rows - 1, self._rules.draw(sequence, self._num_pending(sequence))))
        launched = self._runner.launch([self._sequence_step(share) for share in shares], draws)
        may_wait = not any(draw.has_penalty for _, draw in draws)
        places = {sequence: place for place, sequence in enumerate(drawing)}
        return InFlight(shares, places, launched, may_wait)

    def _account(self, step: InFlight) -> None:
        """What the step computes is there from here on, for whatever is launched after it."""
        running, row = set(self._running), 0
        for share in step.shares:
            sequence, span = share.planned.sequence, share.planned.span
            rows = self._num_logits(share.planned)
            row += rows
            if sequence not in running:
                continue  # its last token came in meanwhile: this one was too many
            sequence.num_computed = span.end
            self._publisher.written(share)
            self._count(sequence, span)
            if sequence.scoring is not None:
                self._score(sequence, step.launched.logits[row - rows : row], span.start)
            if not sequence.is_prefilling and sequence.job.max_new == 0:
                self._end(sequence, FinishReason.LENGTH)

    def _receive(self, step: InFlight) -> None:
        """Its tokens, once they are there: whoever has ended or was cancelled gets none."""
        running = set(self._running)
        for sequence, token in zip(step.places, step.launched.drawn.tokens(), strict=True):
            if sequence not in running:
                continue
            self.sampled_tokens += 1
            self._append(sequence, token.id)
            finish = self._rules.finish_reason(sequence)
            sequence.job.on_event(Sampled(token, finish))
            if finish is not None:
                self._end(sequence, finish)
            elif sequence.num_sampled >= sequence.job.max_new:
                self._running.remove(sequence)  # a prefill node's share is done, the answer goes on elsewhere

    def _settle(self) -> bool:
        """Waits for the tokens in flight; False if there are none."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return False
        self._receive(step)
        return True

    def _num_pending(self, sequence: Sequence) -> int:
        return int(self._in_flight is not None and sequence in self._in_flight.places)

    # ------------------------------------------------------------ room

    def _admit(self, sequence: Sequence) -> bool:
        keys, length = sequence.hasher.keys, sequence.prefill_length
        policy = sequence.hit_policy(self.cache.match(keys, max_tokens=length - 1))
        # A prompt that is to be scored needs the logits of all its tokens: nothing of it is skipped.
        limit = policy.reuse_limit(length) if sequence.scoring is None else 0
        headroom = HEADROOM_BLOCKS * self.cache.block_size
        claim = self.cache.claim(
            keys,
            num_tokens=min(length + headroom, self._rules.last_computed(sequence)),
            hit_policy=policy,
            max_reuse_tokens=limit,
            # A block for each that will ask for one: else the newcomer would be preempted at once.
            spare_blocks=sum(self._may_grow(other) for other in (*self._running, *self._expecting)),
        )
        if claim is None:
            return False
        sequence.claim = claim
        if policy.state_arrives:
            self._expecting.add(sequence)
        else:
            sequence.num_computed = claim.reused_tokens
            self._running.append(sequence)
        if sequence.num_preemptions == 0:
            device_event = self._runner.memory.record_event()
            sequence.job.on_event(Admitted(claim.hit, claim.reused_tokens, policy.state_arrives, device_event))
        return True

    def _may_grow(self, sequence: Sequence) -> bool:
        return len(sequence.held.block_ids) * self.cache.block_size < self._rules.last_computed(sequence)

    def _plan(self) -> list[Planned]:
        """The next step's sequences, each with blocks for what it writes; who has to give way has done so."""
        while True:
            planned = self._scheduler.plan(s for s in self._running if self._goes_on(s))
            if all(self.cache.extend(p.sequence.held, p.span.end) for p in planned):
                self._running = after_turn(self._running, planned)
                return planned
            if not self._settle():
                self._preempt(self._victims.victim(self._running))

    def _goes_on(self, sequence: Sequence) -> bool:
        return not self._num_pending(sequence) or self._rules.wants_more(sequence, 1)

    def _preempt(self, sequence: Sequence) -> None:
        """Its blocks are published as they fill; its state is, too, if it stands where one may be kept."""
        self._running.remove(sequence)
        self._publisher.keep_decoded(sequence)
        self.cache.release(sequence.held)
        sequence.claim = None
        sequence.start_over()
        self._waiting.put_back(sequence)
        self.preemptions += 1

    # ------------------------------------------------------------ pieces of a step

    def _sequence_step(self, share: Share) -> SequenceStep:
        sequence, span = share.planned.sequence, share.planned.span
        claim = sequence.held
        feed = self._in_flight.places.get(sequence) if self._in_flight is not None else None
        return SequenceStep(
            tokens=sequence.tokens[span.start : span.end] if feed is None else (FUTURE_TOKEN,),
            start=span.start,
            block_ids=claim.block_ids,
            src_slot=sequence.state_slot if span.start else None,
            dst_slot=claim.slot,
            emit=tuple((boundary.num_tokens, slot) for boundary, slot in share.emit),
            num_logits=self._num_logits(share.planned),
            feed=feed,
        )

    def _num_logits(self, planned: Planned) -> int:
        sequence, span = planned.sequence, planned.span
        if sequence.scoring is not None:
            return span.end - span.start
        return int(span.end >= sequence.prefill_length and sequence.job.max_new > 0)

    def _count(self, sequence: Sequence, span: ChunkSpan) -> None:
        """Tells of the prompt's progress; what was computed before a preemption is no progress."""
        self.computed_tokens += span.end - span.start
        self.recomputed_tokens += max(0, min(span.end, sequence.computed_before) - span.start)
        start, end = max(span.start, sequence.computed_before), min(span.end, sequence.prompt_length)
        if start < end:
            sequence.num_prefilled += end - start
            sequence.job.on_event(Computed(end, self._runner.memory.record_event()))

    def _score(self, sequence: Sequence, logits: Tensor, start: int) -> None:
        """Row i of logits predicts the prompt's token start + i + 1; nothing predicts its first."""
        prompt, num_top = sequence.request.tokens, sequence.scoring
        assert num_top is not None
        if start == 0:
            sequence.scored.append(Token(prompt[0]))
        targets = prompt[start + 1 : start + 1 + logits.shape[0]]
        sequence.scored.extend(score(logits[: len(targets)], targets, num_top))
        if not sequence.is_prefilling:
            sequence.scoring = None
            sequence.job.on_event(Scored(tuple(sequence.scored)))

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.tokens.append(token_id)
        sequence.hasher.extend([token_id])
        sequence.num_sampled += 1

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._running.remove(sequence)
        sequence.job.on_event(Finished(reason))
