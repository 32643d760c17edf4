"""A game of chance with an engine that drafts: requests come, wait, go and fail while drafts begin and end."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headrace.engine.build import BuiltEngine
from headrace.engine.failures import NeedsMoreMemory, OutOfMemory
from headrace.engine.sequence import Event, Failed, Sampled, Sequence
from headrace.forward.sequence_input import SequenceInput
from headrace.request import FinishReason
from headrace.speculation.draft_count import FixedCount, Offer, StepPrice
from tests.support.engine.drafters import num_drafted, steps
from tests.support.engine.driving import Run, assert_nothing_in_use, fail_launches, request, submit
from tests.support.engine.interpreted import capture_all, capture_layer

MOST_RUNNING, MOST_HERE, MOST_TURNS = 4, 6, 3000
RARE = (
    "plain behind a check",
    "check behind a plain step",
    "check behind a check",
    "accepted draft",
    "wrong draft",
    "no draft slot left",
    "checkpoint used",
    "preemption",
    "launch without memory",
    "passes without memory",
    "halt",
    "pause",
    "release",
    "end from outside",
)
RARE_PASSES = (
    "check and chunks in one pass",
    "check and several chunks in one pass",
    "check behind a check and chunks in one pass",
    "check of future drafts and chunks in one pass",
)
"""Where passes are captured."""


class RandomCount(FixedCount):
    """Begins and ends to draft at random; as long as it does, some sequences draft fewer tokens, or none."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(max_step_drafts=64)
        self._dice = dice
        self._is_on = False

    def counts(self, offers: list[Offer], price: StepPrice, now_s: float) -> list[int]:
        self._is_on ^= self._dice.random() < 0.35
        most = [offer.most if self._is_on else 0 for offer in offers]
        return [self._dice.choice((0, min(1, number), number, number)) for number in most]


class Game:
    """Requests that meet in one engine, and what happens to them. `seen` counts the rare states that it was in.

    answered      answers without drafts; the game asks for beginnings of these
    is_captured   all passes are captured, and not only the layer's
    """

    def __init__(self, built: BuiltEngine, answered: list[Run], dice: random.Random, *, is_captured: bool) -> None:
        self._built = built
        self._dice = dice
        self._answered = answered
        self._asked: list[tuple[Run, Run]] = []  # all that came, each with the answer that it asks for
        self._here: list[Run] = []  # those that were not released
        self._ended: set[Sequence] = set()  # from outside
        self.seen: Counter[str] = Counter()
        engine, runner = built.engine, built.engine._runner
        if is_captured:
            capture_all(runner, MOST_RUNNING, 256, 256)
            for passes in runner._graphs.mixed_checks:
                passes.run = self._noted_run(passes.run)
        else:
            capture_layer(runner, MOST_RUNNING, 256)
        runner.launch = self._noted(runner.launch)
        assert engine.drafting is not None and engine._tail_rows is not None
        engine.drafting.count = RandomCount(dice)
        self._num_rows = engine._tail_rows.num_free

    def play(self) -> None:
        """Plays until all requests have come and gone."""
        num_to_come = self._dice.randrange(6, 12)
        for _ in range(MOST_TURNS):
            if num_to_come and len(self._here) < MOST_HERE and self._happens(0.4):
                self._join()
                num_to_come -= 1
            for run in [*self._here]:
                if run in self._here:  # what happened to another one may have released it
                    self._happen_to(run)
            self._turn()
            if not self._here and not num_to_come:
                break
        assert not self._here, f"requests are still here after {MOST_TURNS} turns"
        self._turn()  # takes the tokens of the last step
        self._assert_nothing_taken()

    def assert_answers(self) -> None:
        """What requests got is the beginning of their answers without drafts; where nothing cut them off, all of it."""
        for run, known in self._asked:
            sampling, num_prompt_tokens = run.sequence.request.sampling, run.sequence.prompt_length
            expected = known.tokens[: min(sampling.max_tokens, self._built.max_model_tokens - num_prompt_tokens)]
            if not run.is_finished or run.sequence in self._ended:
                expected = expected[: len(run.tokens)]
            assert run.tokens == expected
            refusals = [event.error for event in run.events if isinstance(event, Failed)]
            assert all(isinstance(error, NeedsMoreMemory | OutOfMemory) for error in refusals)
            if sampling.logprobs is not None:
                assert _logprobs(run) == pytest.approx(_logprobs(known)[: len(expected)], abs=2e-4)

    def fail_at_random(self) -> None:
        """Has some launches and some of the layer's passes find no memory, before they run or behind it."""
        runner = self._built.engine._runner
        for after_writing in (False, True):
            fail_launches(self._built, lambda inputs: self._happens(0.025), after_writing=after_writing)
        runner.draft_ahead = self._failing(runner.draft_ahead)
        runner.draft_tokens = self._failing(runner.draft_tokens)

    # ------------------------------------------------------------ what happens to requests

    def _join(self) -> None:
        known = self._dice.choice(self._answered)
        prompt, longest = [*known.sequence.request.tokens], known.sequence.request.sampling
        max_tokens, logprobs = self._dice.randint(1, longest.max_tokens), self._dice.choice((None, 0, 0))
        asked = request(
            prompt, replace(longest, max_tokens=max_tokens, logprobs=logprobs), client=self._dice.randrange(3)
        )
        run = submit(self._built, asked, prompt_logprobs=0 if self._happens(0.1) else None)
        self._asked.append((run, known))
        self._here.append(run)
        if self._happens(0.1):
            self._release_at(self._dice.randrange(1, 12), run)

    def _happen_to(self, run: Run) -> None:
        chances: dict[Callable[[Run], None] | None, float]
        if run.is_finished or any(isinstance(event, Failed) for event in run.events):
            chances = {self._release: 0.7}
        elif run.sequence.is_paused or run.sequence in self._built.engine._halted:
            chances = {self._go_on: 0.35, self._release: 0.05}
        else:
            chances = {self._halt: 0.03, self._pause: 0.03, self._release: 0.015, self._end: 0.01}
        chances[None] = 1 - sum(chances.values())
        [event] = self._dice.choices([*chances], chances.values())
        if event is not None:
            event(run)

    def _halt(self, run: Run) -> None:
        self._built.engine.halt(run.sequence)
        if run.sequence in self._built.engine._halted:
            assert run.sequence.num_computed == len(run.sequence.tokens) - 1
            self.seen["halt"] += 1

    def _pause(self, run: Run) -> None:
        self._built.engine.pause(run.sequence)
        self.seen["pause"] += bool(run.tokens)

    def _go_on(self, run: Run) -> None:
        self._built.engine.unpause(run.sequence)
        self._built.engine.unhalt(run.sequence)

    def _end(self, run: Run) -> None:
        if run.tokens:
            self._ended.add(run.sequence)
            self._built.engine.finish(run.sequence, FinishReason.STOP)
            self.seen["end from outside"] += 1

    def _release(self, run: Run) -> None:
        self._built.engine.release(run.sequence)
        self._here.remove(run)
        self.seen["release"] += bool(run.tokens) and not run.is_finished

    def _release_at(self, num_tokens: int, run: Run) -> None:
        """Has a request released when it gets so many tokens, while others' may be yet to be reported."""

        def release_at(event: Event) -> None:
            run.events.append(event)
            if isinstance(event, Sampled) and len(run.tokens) == num_tokens:
                self._release(run)

        run.sequence.job = replace(run.sequence.job, on_event=release_at)

    # ------------------------------------------------------------ the engine

    def _happens(self, chance: float) -> bool:
        return self._dice.random() < chance

    def _turn(self) -> None:
        steps(self._built, 1)
        engine = self._built.engine
        num_tails = sum(sequence.tail is not None for sequence in engine.sequences)
        assert engine._tail_rows.num_free == self._num_rows - num_tails
        self.seen["no draft slot left"] += not engine.cache.draft_slots.num_free

    def _assert_nothing_taken(self) -> None:
        engine = self._built.engine
        assert not engine.has_work and engine._tail_rows.num_free == self._num_rows
        assert engine.cache.draft_slots.num_free == engine.cache.draft_slots.total
        assert_nothing_in_use(self._built)
        drafted, accepted = num_drafted(self._built)
        self.seen["accepted draft"] += accepted
        self.seen["wrong draft"] += drafted - accepted
        self.seen["checkpoint used"] += engine.cache.stats().totals.checkpoints_used
        self.seen["preemption"] += engine.preemptions
        self.seen["launch without memory"] += engine.shortages

    def _noted(self, launch: Callable) -> Callable:
        def noted(inputs: list[SequenceInput], *rest: object) -> object:
            for entry in inputs:
                if entry.behind is not None:
                    self.seen["check behind a check" if entry.has_drafts else "plain behind a check"] += 1
                elif entry.future_token is not None and entry.has_drafts:
                    self.seen["check behind a plain step"] += 1
            return launch(inputs, *rest)

        return noted

    def _noted_run(self, run: Callable) -> Callable:
        def noted(inputs: list[SequenceInput]) -> torch.Tensor:
            self.seen["check and chunks in one pass"] += 1
            self.seen["check and several chunks in one pass"] += sum(entry.is_prompt for entry in inputs) > 1
            self.seen["check behind a check and chunks in one pass"] += any(entry.behind for entry in inputs)
            has_future = any(entry.future_drafts is not None for entry in inputs)
            self.seen["check of future drafts and chunks in one pass"] += has_future
            return run(inputs)

        return noted

    def _failing(self, passes: Callable) -> Callable:
        def draft_or_fail(*starts: object) -> object:
            fails = self._happens(0.1)
            if not fails or self._happens(0.5):
                drafts = passes(*starts)
            if fails:
                self.seen["passes without memory"] += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.14 GiB")
            return drafts

        return draft_or_fail


def _logprobs(run: Run) -> list[float]:
    """Of its tokens; none if it did not ask for them."""
    tokens = [event.token for event in run.events if isinstance(event, Sampled)]
    return [token.logprobs.logprob for token in tokens if token.logprobs is not None]
