"""The requests of one engine, from submission to release. No tensors.

    waiting -> running -> ended -> released
    waiting -> following -> waiting      another one computes the same prefix (headrace/engine/scheduling/following.py)
    waiting -> receiving -> running      the state arrives by transfer
    receiving -> waiting                 it does not arrive: `prefill_locally`
    running -> waiting                   preempted
    running -> halted -> running         to be handed over to another node, or not after all

A claim covers the tokens that are there and grows with the answer. When a running request needs a block and none is
available, the victim policy's choice is preempted: its computed blocks stay findable in the cache as long as they last,
its claim is released, and it is admitted again before any new request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count

from headrace.cache.checkpoints import CheckpointPolicy
from headrace.cache.leases import Leases
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher
from headrace.engine.intake import Intake
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.scheduling.cost_fit import CostFit
from headrace.engine.scheduling.following import best_following, cost_alone
from headrace.engine.scheduling.line import tokens_before
from headrace.engine.scheduling.load import EngineLoad
from headrace.engine.scheduling.scheduler import Scheduler, VictimPolicy, smallest_gap_s
from headrace.engine.scheduling.waiting import WaitingLine
from headrace.engine.sequence import AdmissionTimedOut, Admitted, DeviceEvent, Finished, Sequence
from headrace.engine.tail_rows import TailRows
from headrace.grammar import Grammars
from headrace.request import FinishReason
from headrace.step_costs import StepCosts, StepShape

HEADROOM_BLOCKS = 1  # claimed beyond the tokens that are there: most answers' first steps need no growth


class EngineRequests:
    """The part of an engine that admits requests and gives back what they hold; `Engine` adds the steps.

    tail_rows      rows for the tails of sequences that decode; None: the model keeps no tails
    record_event   an event behind everything the device has been given to do; None where that is done already
    clock          seconds; deadlines of jobs are on it
    """

    def __init__(
        self,
        cache: PrefixCache,
        policy: CheckpointPolicy,
        scheduler: Scheduler,
        victims: VictimPolicy,
        rules: StopRules,
        *,
        vocab_size: int,
        num_blocks: int,
        prior_costs: StepCosts,
        record_event: Callable[[], DeviceEvent | None],
        grammars: Grammars,
        clock: Callable[[], float],
        tail_rows: TailRows | None,
    ) -> None:
        self.cache = cache
        self._tail_rows = tail_rows
        self.leases = Leases(clock)
        self.preemptions = 0
        self.pauses = 0
        self.cost_fit = CostFit(prior_costs)
        self._publisher = Publisher(cache, policy)
        self._scheduler = scheduler
        self._victims = victims
        self._rules = rules
        self.intake = Intake(rules, grammars, cache.block_size, num_blocks=num_blocks, vocab_size=vocab_size)
        self._record_event = record_event
        self._clock = clock
        self._arrivals = count()
        self._waiting = WaitingLine()
        self._is_full = False  # the first of the line found no blocks or slot
        self.is_admitting = False  # the last `admit` had no time for all that may be admitted
        self._receiving: set[Sequence] = set()  # admitted, and their state has yet to arrive
        self._running: list[Sequence] = []  # those that have waited longest for a step first
        self._prompt_tokens = 0  # that steps have computed
        self._halted: set[Sequence] = set()  # keep what they hold: another node receives it

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All sequences that wait, receive, run or are halted."""
        return chain(self._waiting, self._receiving, self._running, self._halted)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_prompts(self) -> int:
        """Prompts that wait for room or are being computed. Call in the engine's thread only."""
        return len(self._waiting) + sum(each.is_prefilling for each in self._running)

    # ------------------------------------------------------------ submission and admission

    def submit(self, sequence: Sequence) -> None:
        """Queues a job for admission, or refuses it; from here on `release` gives back what it holds."""
        request = sequence.request
        assert request.sampling.grammar is None or sequence.grammar is not None, "compile_grammar comes first"
        sequence.arrival = (self._clock() - request.age_s, next(self._arrivals))
        sequence.num_expected = self._num_expected(sequence)
        refusal = self._line_refusal(sequence)
        if refusal is not None:
            sequence.job.on_event(AdmissionTimedOut(refusal))
            return
        self._waiting.join(sequence)

    def _num_expected(self, sequence: Sequence) -> int:
        """Tokens that it will compute before it decodes, by what is cached now."""
        if sequence.to_score:
            return sequence.prefill_length
        hit = self.cache.match(sequence.keys, max_tokens=sequence.prefill_length - 1)
        return sequence.hit_policy(hit).computed_tokens(hit, sequence.prefill_length)

    @property
    def load(self) -> EngineLoad:
        """The work that is here now, as heartbeats report it."""
        return EngineLoad.of(self._running, self._receiving, self._waiting)

    def _line_refusal(self, sequence: Sequence) -> str | None:
        """Why the sequence had better not wait here: the prompts before it take longer than it has."""
        deadline_s = sequence.job.compute_by_s
        if deadline_s is None:
            return None
        ahead = self._tokens_before(sequence, sequence.num_expected)
        left_s, line_s = deadline_s - self._clock(), self._line_s(ahead)
        if line_s <= left_s or not ahead:
            return None
        return (
            f"{ahead} tokens of other prompts come first, {line_s:.1f} s by what this node's steps take, and the "
            f"request has {left_s:.1f} s left: raise request_timeout_s, or add prefill nodes"
        )

    def _line_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens of the prompts that are here are computed, beside what decodes now."""
        load, costs = self.load, self.cost_fit.costs
        depth = load.waiting_depths // max(load.waiting_tokens, 1)
        beside = StepShape(load.num_decoding, load.context_tokens)
        chunk_tokens = self._scheduler.max_step_tokens
        gap_s = smallest_gap_s(s for s in self._running if not s.is_prefilling)
        if gap_s is not None:
            chunk_tokens = max(1, self._scheduler.within(gap_s, beside, depth, costs).fitting(depth))
        prompts = StepShape(prefill_tokens=num_tokens, prefill_depths=depth * num_tokens)
        return costs.line_s(prompts, beside, chunk_tokens=chunk_tokens)

    def _tokens_before(self, sequence: Sequence, own: int) -> int:
        return tokens_before(sequence, self._running, self._waiting, own=own, is_full=self._is_full)

    def admit(self, within_s: float = math.inf) -> None:
        """Admits waiting jobs in their order while the cache has capacity; fails those whose deadline has passed.

        within_s   no more are admitted once it took so long; the others are by the next call
        """
        now_s = self._clock()
        self.leases.expire(now_s)
        for late in self._waiting.expire(now_s, others_hold_room=self._others_hold_room):
            message = "no free blocks or slots in the cache before the deadline: retry later, or add nodes"
            late.job.on_event(AdmissionTimedOut(message))
        self._end_following()
        held = self._held_by_client() if len(self._waiting) else Counter()
        self.is_admitting = self._is_full = False
        while (sequence := self._waiting.first(held)) is not None:
            if self._follow(sequence):
                continue
            if self._admit(sequence):
                self._waiting.admitted(sequence)
                held[sequence.request.client] += 1
                if self._clock() - now_s >= within_s and len(self._waiting):
                    self.is_admitting = True
                    return
            elif (paused := self._settled_paused()) is not None:
                self._preempt(paused)
                held[paused.request.client] -= 1
            else:
                break
        self._is_full = sequence is not None

    def _held_by_client(self) -> Counter[int]:
        return Counter(s.request.client for s in chain(self._receiving, self._running, self._halted))

    def next_deadline_s(self) -> float | None:
        """When `admit` has a job to fail; None if it never will."""
        return self._waiting.next_deadline_s(others_hold_room=self._others_hold_room)

    @property
    def _others_hold_room(self) -> bool:
        """True if a request holds blocks here and waits for another node, which may wait for this one."""
        return any(not sequence.num_expected for sequence in self._receiving)

    def _admit(self, sequence: Sequence) -> bool:
        keys, length = sequence.keys, sequence.prefill_length
        policy = sequence.hit_policy(self.cache.match(keys, max_tokens=length - 1))
        limit = policy.reuse_limit(length)
        if sequence.to_score:  # needs the logits of all these tokens: none of them is skipped
            limit = min(limit, sequence.num_scored)
        headroom = HEADROOM_BLOCKS * self.cache.block_size
        claim = self.cache.claim(
            keys,
            num_tokens=min(length + headroom, self._rules.last_computed(sequence)),
            hit_policy=policy,
            max_reuse_tokens=limit,
            # A block for each request that will need one: else the newcomer would be preempted at once.
            min_blocks_left=sum(self._may_grow(other) for other in (*self._running, *self._receiving)),
        )
        if claim is None:
            return False
        sequence.claim = claim
        if policy.state_arrives:
            self._receiving.add(sequence)
        else:
            sequence.num_computed = claim.reused_tokens
            self._running.append(sequence)
        if sequence.num_preemptions == 0:
            event = Admitted(claim.hit, claim.reused_tokens, policy.state_arrives, self._record_event())
            sequence.job.on_event(event)
        return True

    # ------------------------------------------------------------ prefixes under way

    def _follow(self, sequence: Sequence) -> bool:
        """Has a new sequence wait for a running one that computes what it begins with, if it is done no later so."""
        if sequence.num_preemptions or sequence.to_score or self._prompt_tokens >= sequence.follow_until:
            return False
        following = best_following(sequence, self._running, self.cache.block_size)
        if following is None or not self._publisher.would_keep(following.leader, following.num_tokens):
            return False
        hit = self.cache.match(sequence.keys, max_tokens=sequence.prefill_length - 1)
        policy = sequence.hit_policy(hit)
        alone = cost_alone(sequence, following, policy.reusable_tokens(hit), self._tokens_before)
        if alone is None or policy.state_arrives:
            return False
        following.leader.parts_at = tuple({*following.leader.parts_at, following.num_tokens})
        sequence.following = following
        sequence.follow_until = min(sequence.follow_until, self._prompt_tokens + alone)
        sequence.num_expected = sequence.prefill_length - following.num_tokens
        return True

    def _end_following(self) -> None:
        """Lets those go on for which the tokens that they wait for are there, or will not be."""
        for sequence in self._waiting:
            if sequence.following is None:
                continue
            if sequence.following.is_over(self._running) or self._prompt_tokens >= sequence.follow_until:
                sequence.following = None
                sequence.num_expected = self._num_expected(sequence)

    def _may_grow(self, sequence: Sequence) -> bool:
        return len(sequence.held.block_ids) * self.cache.block_size < self._rules.last_computed(sequence)

    # ------------------------------------------------------------ states that arrive

    def run_decode(self, sequence: Sequence, first_token: int) -> None:
        """The prompt's blocks and state have been received: decodes on after `first_token`."""
        self._receiving.discard(sequence)
        sequence.num_computed = sequence.prompt_length
        sequence.is_started = True
        self._publisher.publish_blocks(sequence)
        self._publisher.keep_decoded(sequence)
        sequence.append(first_token)
        self._running.append(sequence)
        finish = self._rules.finish_reason(sequence)
        if finish is not None:
            self._end(sequence, finish)

    def resume_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens and the state there have been received: prefills the rest.

        The received state becomes a checkpoint, as if it had been decoded here. Does nothing if the sequence's lease
        has expired meanwhile: it holds nothing any more.
        """
        if sequence.claim is None:
            return
        self._receiving.discard(sequence)
        sequence.num_computed = num_tokens
        self.cache.count_fetched(sequence.claim, num_tokens, max_reuse_tokens=sequence.prefill_length - 1)
        self._publisher.publish_blocks(sequence)
        self._publisher.keep_received(sequence)
        self._running.append(sequence)

    def prefill_locally(self, sequence: Sequence) -> None:
        """The awaited state will not arrive: the sequence is admitted again, before any new request, and prefills.

        Does nothing if its lease has expired meanwhile: it holds nothing any more.
        """
        if sequence.claim is None:
            return
        self._receiving.discard(sequence)
        self._give_back(sequence)
        sequence.prefill_locally()
        self._wait_again(sequence)

    # ------------------------------------------------------------ pauses

    def pause(self, sequence: Sequence) -> None:
        """Leaves it out of all steps until `unpause`. It keeps its blocks until another request needs them."""
        sequence.is_paused = True
        self.pauses += 1

    def unpause(self, sequence: Sequence) -> None:
        sequence.is_paused = False

    def unhalt(self, sequence: Sequence) -> None:
        """Has a sequence decode on that was halted."""
        if sequence in self._halted:
            self._halted.remove(sequence)
            self._running.append(sequence)

    # ------------------------------------------------------------ the end

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends it now, with its blocks and checkpoints published; the claim is held until `release`."""
        if sequence in self._running:
            self._end(sequence, reason)
        elif sequence in self._halted:
            self._halted.remove(sequence)
            sequence.job.on_event(Finished(reason))
        elif sequence in self._waiting.preempted:
            self._waiting.leave(sequence)
            sequence.job.on_event(Finished(reason))

    def lease(self, sequence: Sequence, deadline_s: float) -> None:
        """Keeps the claim of a finished prefill until `release`, but not beyond `deadline_s`."""
        sequence.lease = self.leases.grant(lambda: self._expired(sequence), deadline_s=deadline_s)

    def release(self, sequence: Sequence) -> None:
        """Gives back all it holds, in whatever phase it is; does nothing if it holds nothing (any more)."""
        self._waiting.leave(sequence)
        self._receiving.discard(sequence)
        self._halted.discard(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.lease is not None:
            self.leases.release(sequence.lease)  # calls `_expired`, which comes back here without the lease
        elif sequence.claim is not None:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.release(sequence.held)
        sequence.claim = None
        self._free_row(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        """Takes its tail from a sequence that decodes no further, or not now."""
        if self._tail_rows is not None and sequence.tail is not None:
            self._tail_rows.give_back(sequence.tail.row)
            sequence.tail = None

    def _expired(self, sequence: Sequence) -> None:
        sequence.lease = None
        self.release(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        sequence.job.on_event(Finished(reason))

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the steps for good; it holds its claim until `release`."""
        self._running.remove(sequence)
        self._free_row(sequence)

    def _settled_paused(self) -> Sequence | None:
        """A running sequence that is paused, and of which no token is in flight; None if there is none."""
        paused = [s for s in self._running if s.is_paused and not s.drafts and s.num_computed < len(s.tokens)]
        return self._victims.victim(paused) if paused else None

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence: it keeps a checkpoint if its state stands at a boundary, and waits to be recomputed."""
        self._publisher.keep_decoded(sequence)
        self._compute_again(sequence)

    def _compute_again(self, sequence: Sequence) -> None:
        """Takes a sequence out of the steps: it gives everything back, and waits to be computed again."""
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.start_over()
        self._wait_again(sequence)
        self.preemptions += 1

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.num_expected = self._num_expected(sequence)
        self._waiting.put_back(sequence)
