"""Drafts that a model's layer makes behind a step whose tokens nobody has read yet, in Triton's interpreter."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headrace.cache.tails import Tail
from headrace.engine.build import BuiltEngine
from headrace.engine.drafts.ahead import CheckedSequence, FutureDrafts
from headrace.engine.drafts.passes import DraftStart, draft_tokens
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.engine.sequence import Failed, Halted
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.weights import load_model
from headrace.request import Request, Sampling
from headrace.speculation.draft_count import FixedCount, Offer, StepPrice
from tests.support.engine.drafters import (
    ANSWER,
    KNOWN,
    MTP_DRAFTS,
    RANDOM,
    ROOMY,
    mtp_engine_of,
    num_drafted,
    steps,
    together,
)
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    fail_launches,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.interpreted import (
    BLOCKS_EACH,
    assert_same_memory,
    blocks_of,
    capture_layer,
    forget_all,
    once_needed,
    replayed_checks,
    step,
)
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda.py that does this")
MAX_TOKENS = BLOCKS_EACH * 16
BEST = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


def ahead_of(path: Path, **changes: object) -> BuiltEngine:
    built = small_engine(path, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=True, max_running=4, **changes)
    capture_layer(built.engine._runner, 4, 256)
    return built


@pytest.fixture
def num_future(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of drafts in each sequence's part of a step whose values the host did not know."""
    numbers: list[int] = []
    made = FutureDrafts.__init__

    def noted(self: FutureDrafts, *args: object) -> None:
        made(self, *args)
        numbers.append(len(self))

    monkeypatch.setattr(FutureDrafts, "__init__", noted)
    return numbers


@pytest.fixture
def num_behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each step whose places the host did not know when it launched it."""
    numbers: list[int] = []
    launch = ModelRunner.launch

    def noted(self: ModelRunner, inputs: list[SequenceInput], *rest: object) -> object:
        numbers.append(sum(entry.behind is not None for entry in inputs))
        return launch(self, inputs, *rest)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    return numbers


@pytest.mark.parametrize("num_passes", [2, MTP_DRAFTS.max_drafts])  # one replay each, and one for all
@torch.inference_mode()
def test_passes_begin_behind_the_drafts_that_were_right(num_passes: int, trained: Path) -> None:
    """All of three, one of two, and none of one, whose blocks end soon."""
    runners = []
    for _ in range(2):
        model = load_model(str(trained), torch.float32, "cpu", with_mtp=True)
        memory = CacheMemory(model.cache_layout(16), 4 * BLOCKS_EACH, 12)
        runners.append(ModelRunner(model, memory))
        forget_all(runners[-1])
    plain, ours = runners
    capture_layer(ours, 4, MAX_TOKENS, once_needed)
    prompts = [random_prompt(n, seed=n) for n in (14, 30, 9)]
    drafted = [[2, 3, 4], [6, 7], [8]]
    inputs = [
        SequenceInput(
            [1, *drafts],
            len(prompt),
            blocks_of(i),
            i,
            i,
            num_logits=len(drafts) + 1,
            tail=Tail(i, len(prompt), None),
        )
        for i, (prompt, drafts) in enumerate(zip(prompts, drafted, strict=True))
    ]
    for runner in runners:
        runner.forward([step(i, prompt, 0, len(prompt), None, i) for i, prompt in enumerate(prompts)])
        runner.launch(inputs, [(row, BEST) for row in range(9)])
    drawn = torch.tensor([2, 3, 4, 50, 6, 51, 52, 53, 54])
    ours._drawn[:9] = drawn
    starts = [CheckedSequence(entry, first, 64) for entry, first in zip(inputs, (0, 4, 7), strict=True)]
    starts[2] = starts[2]._replace(num_covered=12)
    made = ours.draft_ahead(starts, num_passes)
    known = [
        DraftStart(50, 14 + 4, blocks_of(0), plain.memory.ring_place(0, 14 + 3), num_passes),
        DraftStart(51, 30 + 2, blocks_of(1), plain.memory.ring_place(1, 30 + 1), num_passes),
        DraftStart(53, 9 + 1, blocks_of(2), plain.memory.ring_place(2, 9), 2),
    ]
    expected = draft_tokens(plain.model, plain.memory, known)
    assert made is not None
    ids = made.ids()
    assert [ids[0], ids[1], ids[2][:2]] == expected
    assert_same_memory(ours, plain)
    assert ours.draft_tokens(known) == expected, "passes one by one begin where they are told to"
    # The next check may be about these, and the passes behind it read them where they are.
    tail = Tail(0, 14, None)
    entry = SequenceInput([50, 0, 0], 18, blocks_of(0), 0, 0, num_logits=3, future_drafts=0, tail=tail)
    ours._drawn[:3] = torch.tensor([*ids[0][:2], 60])
    for more in {"tokens": [1] * 5, "num_logits": 5}, {"block_ids": [0] * 99}:
        beyond = replace(inputs[0], **more)
        assert ours.draft_ahead([CheckedSequence(beyond, 0, 64)], 1) is None, "no captured pass holds it"
    again = ours.draft_ahead([CheckedSequence(entry, 0, 64)], 1)
    assert again is not None and ours._drafts is not None
    assert ours._drafts._starts(1).ends.tolist() == [18 + 3 + 1], "both were right"
    at_the_end = replace(inputs[0], start=29, tokens=[1, 2, 3], num_logits=3, block_ids=blocks_of(1))
    ours.draft_ahead([CheckedSequence(at_the_end, 0, 64)], 3)
    assert ours._drafts._table[0, :3].tolist() == blocks_of(1)[:3], "the drafts are in one block more"


@pytest.mark.parametrize("sampling", [ANSWER, RANDOM, replace(RANDOM, repetition_penalty=1.2)])
def test_answers_and_drafts_are_those_of_settled_steps(
    sampling: Sampling, trained: Path, num_future, num_behind
) -> None:
    asked = [request(prompt, sampling) for prompt in (KNOWN, random_prompt(30))]
    settled = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY)
    built = ahead_of(trained)
    tokens = [run.tokens for run in together(built, asked)]
    assert tokens == [run.tokens for run in together(small_engine(trained), asked)]
    together(settled, asked)
    # Behind a check whose drafts may all be right, the last two steps of each answer have room for fewer drafts.
    fewer = [theirs - ours for ours, theirs in zip(num_drafted(built), num_drafted(settled), strict=True)]
    assert 0 <= fewer[1] <= fewer[0] <= len(asked) * 2 * 3
    assert num_drafted(built)[1] > 0 and sum(num_future) > 10
    assert (sum(num_behind) > 10) == (not sampling.has_penalty), "a penalty needs the tokens before"


class OnAndOff(FixedCount):
    """No drafts when it is asked so many times, some in as many, and so on."""

    def __init__(self, period: int) -> None:
        super().__init__(max_step_drafts=64)
        self._period = period
        self._num_asked = 0

    def counts(self, offers: list[Offer], price: StepPrice, now_s: float) -> list[int]:
        is_on = self._num_asked // self._period % 2
        self._num_asked += 1
        return super().counts(offers, price, now_s) if is_on else [0] * len(offers)


@pytest.mark.parametrize("sampling", [ANSWER, RANDOM])
def test_drafts_begin_and_end_while_steps_follow_each_other(sampling: Sampling, trained: Path) -> None:
    """The device never waits for the host: behind a step without drafts some are made for the next but one."""
    asked = [request(prompt, replace(sampling, max_tokens=40)) for prompt in (KNOWN, random_prompt(30))]
    built = ahead_of(trained)
    drafting, launch, launches = built.engine.drafting, built.engine._runner.launch, []
    assert drafting is not None
    drafting.count = OnAndOff(4)

    def noted(inputs: list[SequenceInput], *rest: object) -> object:
        launches.append((built.engine._in_flight is not None, any(entry.has_drafts for entry in inputs)))
        return launch(inputs, *rest)

    built.engine._runner.launch = noted
    tokens = [run.tokens for run in together(built, asked)]
    assert tokens == [run.tokens for run in together(small_engine(trained), asked)]
    follows, has_drafts = zip(*launches, strict=True)
    assert not follows[0] and all(follows[1:])
    changes = sum(one != other for one, other in pairwise(has_drafts))
    assert changes > 2 and num_drafted(built)[1] > 10


def test_where_the_layer_cannot_draft_ahead_its_drafts_follow_known_tokens(trained: Path) -> None:
    built = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=True)
    assert built.engine.drafting is not None
    built.engine.drafting.count = OnAndOff(4)
    asked = request(KNOWN, replace(ANSWER, max_tokens=40))
    assert generate(built, asked).tokens == generate(small_engine(trained), asked).tokens
    assert num_drafted(built)[1] > 5


def test_what_comes_after_a_stop_token_among_drafts_made_ahead_is_dropped(
    trained: Path, num_future, num_behind
) -> None:
    """One ends at its stop token, some steps after the first that might have been it, and two at their lengths."""
    plain = small_engine(trained)
    stopped = [replace(ANSWER, stop_token_ids=(stop,), min_tokens=least) for stop in (7, 9, 11) for least in (2, 5, 8)]
    lengths = {each: len(generate(plain, request(KNOWN, each)).tokens) for each in stopped}
    late = max(stopped, key=lambda each: lengths[each] % ANSWER.max_tokens - each.min_tokens)
    asked = [request(KNOWN, each) for each in (late, replace(ANSWER, max_tokens=13), replace(ANSWER, max_tokens=14))]
    built = ahead_of(trained)
    expected = [run.tokens for run in together(small_engine(trained), asked)]
    assert [run.tokens for run in together(built, asked)] == expected
    assert late.min_tokens + 2 < len(expected[0]) < ANSWER.max_tokens
    assert num_drafted(built)[1] > 0 and sum(num_future) > 5 and sum(num_behind) > 5
    # Behind the first token all come of checks, and none is counted that was too many.
    alone = ahead_of(trained)
    tokens = generate(alone, asked[0]).tokens
    assert alone.engine.drafting is not None
    checks = alone.engine.drafting._num_checks
    assert tokens == expected[0]
    assert sum(number * (1 + accepted) for (_, accepted), number in checks.items()) == len(tokens) - 1


def test_requests_come_and_go_while_drafts_are_made(trained: Path, num_future, num_behind) -> None:
    """One is released, one halted for a while, and one joins that has none made ahead."""
    prompts = (KNOWN, random_prompt(18), random_prompt(19), random_prompt(33))
    asked = [request(prompt, ANSWER) for prompt in prompts]
    expected = [run.tokens for run in together(small_engine(trained), asked)]
    built = ahead_of(trained)
    gone, halted, stays = (submit(built, each) for each in asked[:3])
    while min(len(run.tokens) for run in (gone, halted, stays)) < 5:
        steps(built, 1)
    assert num_future and stays.sequence.drafts and sum(num_behind)
    built.engine.release(gone.sequence)
    built.engine.halt(halted.sequence)
    assert isinstance(halted.events[-1], Halted)
    joins = submit(built, asked[3])
    steps(built, 2)
    built.engine.unhalt(halted.sequence)
    serve(built, halted, stays, joins)
    assert [run.tokens for run in (halted, stays, joins)] == expected[1:]
    assert gone.tokens == expected[0][: len(gone.tokens)]
    assert_nothing_in_use(built)


def test_preempted_requests_get_the_answers_they_would_have_had(trained: Path, num_future, num_behind) -> None:
    asked: list[Request] = [request(random_prompt(n), replace(ANSWER, max_tokens=40)) for n in (30, 31, 32)]
    scarce = mtp_engine_of(trained, 11, 9, overlap=True, max_running=4)
    capture_layer(scarce.engine._runner, 4, 256)
    runs = together(scarce, asked)
    assert [run.tokens for run in runs] == [run.tokens for run in together(small_engine(trained), asked)]
    assert scarce.engine.preemptions > 0 and num_future and sum(num_behind)


@pytest.mark.parametrize("lengths", [(30, 31), (32, 32)], ids=["in their blocks", "where their blocks end"])
def test_drafts_ahead_preempt_nobody(lengths: tuple[int, int], trained: Path) -> None:
    """Both answers end in their last blocks, for which there is just enough room."""
    asked = [request(KNOWN, replace(ANSWER, max_tokens=length)) for length in lengths]
    built = mtp_engine_of(trained, 6, 9, overlap=True, max_running=4)
    capture_layer(built.engine._runner, 4, 256)
    runs = together(built, asked)
    assert [run.tokens for run in runs] == [run.tokens for run in together(small_engine(trained), asked)]
    assert built.engine.preemptions == 0


def test_where_slots_for_drafts_are_short_a_check_is_waited_for(trained: Path, num_behind) -> None:
    """Two slots for the states of three sequences: some checks stand behind others, and some behind known tokens."""
    asked = [request(random_prompt(n), replace(ANSWER, max_tokens=20)) for n in (14, 15, 29)]
    short = mtp_engine_of(trained, 24, 6, overlap=True, max_running=4)
    capture_layer(short.engine._runner, 4, 256)
    assert short.engine.cache.draft_slots.total == 2
    runs = together(short, asked)
    assert [run.tokens for run in runs] == [run.tokens for run in together(small_engine(trained), asked)]
    drafting = short.engine.drafting
    assert drafting is not None and 0 < drafting.steps_followed < drafting.steps
    is_behind = [number > 0 for number in num_behind[num_behind.index(max(num_behind)) :]]
    assert any(is_behind) and not all(is_behind)


@pytest.mark.parametrize(("max_running", "slots"), [(1, 2), (4, 6)])
def test_two_checks_in_flight_have_slots_of_their_own(max_running: int, slots: int, trained: Path) -> None:
    """Without the second slot, a sequence alone would wait for its own check at each state that it writes."""
    built = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY, max_running=max_running)
    assert built.engine.cache.draft_slots.total == slots


@pytest.mark.parametrize("after_writing", [False, True])
def test_a_check_behind_another_one_that_finds_too_little_memory_costs_one_request(
    after_writing: bool, trained: Path, num_behind
) -> None:
    asked = [request(prompt, ANSWER) for prompt in (KNOWN, random_prompt(30))]
    built = ahead_of(trained)
    fails = [True]
    fail_launches(
        built,
        lambda inputs: any(each.behind is not None for each in inputs) and bool(fails) and fails.pop(),
        after_writing=after_writing,
    )
    runs = [submit(built, each) for each in asked]
    while not built.engine.shortages:
        steps(built, 1)
    [refused] = [run for run in runs if any(isinstance(event, Failed) for event in run.events)]
    [other] = [run for run in runs if run is not refused]
    serve(built, other)
    assert other.tokens == generate(small_engine(trained), asked[runs.index(other)]).tokens
    built.engine.release(refused.sequence)
    assert_nothing_in_use(built)
    assert sum(num_behind)


@pytest.mark.slow
@pytest.mark.parametrize("count", [FixedCount(64), OnAndOff(2)], ids=["always", "on and off"])
def test_captured_steps_behind_checks_change_nobodys_tokens(count: FixedCount, trained: Path, num_behind) -> None:
    asked = request(KNOWN, replace(GREEDY, max_tokens=12))
    built = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=True, max_running=1)
    runner, drafting = built.engine._runner, built.engine.drafting
    assert drafting is not None
    drafting.count = count
    runner.capture_checks(1, 3, 64, replayed_checks(runner.model.config.vocab_size))
    assert generate(built, asked).tokens == generate(small_engine(trained), asked).tokens
    assert sum(num_behind) > 1
