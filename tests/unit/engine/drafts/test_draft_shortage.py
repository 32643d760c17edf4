"""Drafts where blocks, slots or memory are short, and under preemptions, moves and releases."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cache.draft_slots import DraftSlots
from headrace.cache.types import SlotId
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Halted, Sampled
from headrace.request import Request, Sampling
from tests.support.engine.drafters import (
    DRAFTERS,
    always_right,
    drafting_engine,
    drafting_engine_of,
    num_drafted,
    sometimes_wrong,
    steps,
    text,
    together,
)
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    fail_launches,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt
from tests.support.node.engine_pair import answer_with_a_move

ANSWER = replace(GREEDY, max_tokens=40)
RANDOM = Sampling(max_tokens=40, seed=7, temperature=0.9, top_p=0.95, ignore_eos=True)
PENALISED = replace(RANDOM, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


@pytest.mark.parametrize("sampling", [ANSWER, PENALISED], ids=["greedy", "penalties"])
@pytest.mark.parametrize(("policy", "overlap"), [("none", False), ("branch", False), ("branch", True)])
def test_preempted_requests_get_the_answers_they_would_have_had(
    policy: str, overlap: bool, sampling, tiny_checkpoint
) -> None:
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(n), replace(sampling, max_tokens=100)) for n in (100, 101, 102, 103)]
    expected = together(small_engine(path), asked)
    drafter, settings = sometimes_wrong(*map(text, asked, expected)), {"checkpoint_policy": policy, "overlap": overlap}
    scarce = drafting_engine_of(path, drafter, 36, 9, **settings)
    runs = together(scarce, asked)
    assert scarce.engine.preemptions > 0 and num_drafted(scarce)[1] > 0
    assert [run.tokens for run in runs] == [run.tokens for run in expected]


def test_drafts_preempt_nobody(tiny_checkpoint) -> None:
    """Both answers end in their last blocks, for which there is just enough room."""
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(20, seed), replace(ANSWER, max_tokens=28)) for seed in (1, 2)]
    expected = together(small_engine(path), asked)
    built = drafting_engine_of(path, always_right(*map(text, asked, expected)), 6, 9, max_drafts=8)
    assert [run.tokens for run in together(built, asked)] == [run.tokens for run in expected]
    assert built.engine.preemptions == 0


@pytest.fixture
def num_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots that each step takes for states that rest on drafts."""
    numbers: list[int] = [0]
    take, give_back = DraftSlots.take, DraftSlots.give_back

    def noted(self: DraftSlots, num_slots: int) -> list[SlotId]:
        numbers[-1] += num_slots
        return take(self, num_slots)

    def given_back(self: DraftSlots, taken: list[SlotId]) -> None:
        numbers.extend([0] * (numbers[-1] > 0))
        give_back(self, taken)

    monkeypatch.setattr(DraftSlots, "take", noted)
    monkeypatch.setattr(DraftSlots, "give_back", given_back)
    return numbers


@pytest.mark.parametrize("family", ["granite", "jamba"], ids=["with tails", "without"])
def test_a_step_drafts_what_it_has_slots_for(family: str, num_taken: list[int], tiny_checkpoint) -> None:
    """With tails that is a slot for each sequence whose next state rests on a draft, without one for each draft."""
    path = tiny_checkpoint(family)
    asked = [request(random_prompt(20, seed), ANSWER) for seed in range(5)]
    expected = together(small_engine(path), asked)
    drafter = always_right(*map(text, asked, expected))
    built = drafting_engine_of(path, drafter, 60, 6, checkpoint_policy="none")
    runs = together(built, asked)
    assert max(num_taken) == built.sizes.num_draft_slots == 2
    assert num_drafted(built)[1] > (40 if family == "granite" else 0)
    assert [run.tokens for run in runs] == [run.tokens for run in expected]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_halted_request_goes_on_in_another_engine(drafter, num_steps: int, tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("qwen35"), random_prompt(40)
    whole = generate(small_engine(path), request(prompt, PENALISED)).tokens
    here, there = (drafting_engine(path, drafter([*prompt, *whole]), overlap=True) for _ in range(2))
    assert answer_with_a_move(here, there, request(prompt, PENALISED), num_steps) == whole
    for built in (here, there):
        assert_nothing_in_use(built)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 6, 7])
def test_a_request_that_is_released_while_its_tokens_come_gives_everything_back(
    num_tokens: int, overlap: bool, tiny_checkpoint
) -> None:
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(n), ANSWER) for n in (30, 31)]
    expected = together(small_engine(path), asked)
    built = drafting_engine(path, always_right(*map(text, asked, expected)), max_drafts=5, overlap=overlap)
    run, other = (submit(built, each) for each in asked)

    def leave(event: object) -> None:
        run.events.append(event)
        if len(run.tokens) == num_tokens and isinstance(event, Sampled):
            built.engine.release(run.sequence)

    run.sequence.job = replace(run.sequence.job, on_event=leave)
    serve(built, other)
    assert run.tokens == expected[0].tokens[:num_tokens]
    assert other.tokens == expected[1].tokens
    assert_nothing_in_use(built)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after_writing", [False, True])
def test_a_step_with_drafts_that_finds_too_little_memory_costs_one_request(
    after_writing: bool, overlap: bool, tiny_checkpoint
) -> None:
    path = tiny_checkpoint("qwen35")
    asked = [request(random_prompt(n), PENALISED) for n in (30, 31)]
    expected = together(small_engine(path), asked)
    built = drafting_engine(path, sometimes_wrong(*map(text, asked, expected)), overlap=overlap)
    fail_launches(built, lambda inputs: any(len(each.tokens) > 150 for each in inputs), after_writing=after_writing)
    runs = [submit(built, each) for each in asked]
    steps(built, 4)
    poison = submit(built, request(random_prompt(200), ANSWER))
    serve(built, *runs)
    assert [run.tokens for run in runs] == [run.tokens for run in expected]
    assert built.engine.shortages == 1
    built.engine.release(poison.sequence)
    assert_nothing_in_use(built)


# ------------------------------------------------------------ while a step with drafts is under way


def stepped(built: BuiltEngine, asked: list[Request], num_tokens: int) -> list[Run]:
    """Runs of these requests, each with so many tokens at least, and a step with drafts of each under way."""
    runs = [submit(built, each) for each in asked]
    while any(len(run.tokens) < num_tokens or not run.sequence.drafts for run in runs):
        steps(built, 1)
    return runs


@pytest.fixture
def two(tiny_checkpoint) -> tuple[Path, list[Request], list[Run]]:
    """Two requests of a model, and their answers without drafts."""
    path = tiny_checkpoint("qwen35")
    asked = [request(random_prompt(n), ANSWER) for n in (30, 31)]
    return path, asked, together(small_engine(path), asked)


def test_a_step_with_drafts_is_under_way_while_commands_run(two) -> None:
    path, asked, expected = two
    built = drafting_engine(path, always_right(*map(text, asked, expected)), overlap=True)
    runs = stepped(built, asked, 5)
    assert built.engine.has_work
    before = [len(run.tokens) for run in runs]
    steps(built, 1)
    assert [len(run.tokens) for run in runs] == [number + 4 for number in before]
    for run in runs:
        built.engine.release(run.sequence)


def test_a_request_that_is_released_under_way_gives_everything_back(two) -> None:
    path, asked, expected = two
    built = drafting_engine(path, always_right(*map(text, asked, expected)), overlap=True)
    gone, other = stepped(built, asked, 5)
    built.engine.release(gone.sequence)
    serve(built, other)
    assert other.tokens == expected[1].tokens
    assert gone.tokens == expected[0].tokens[: len(gone.tokens)] and not gone.is_finished
    assert built.engine.cache.draft_slots.num_free == built.sizes.num_draft_slots
    assert_nothing_in_use(built)


def test_a_halt_waits_for_all_tokens_under_way(two) -> None:
    path, asked, expected = two
    built = drafting_engine(path, sometimes_wrong(*map(text, asked, expected)), overlap=True)
    halted, other = stepped(built, asked, 5)
    built.engine.halt(halted.sequence)
    assert isinstance(halted.events[-1], Halted)
    assert halted.sequence.num_computed == len(halted.sequence.tokens) - 1 == 29 + len(halted.tokens)
    steps(built, 3)
    built.engine.unhalt(halted.sequence)
    serve(built, halted, other)
    assert [run.tokens for run in (halted, other)] == [run.tokens for run in expected]
    assert_nothing_in_use(built)


def test_a_request_paused_with_drafts_under_way_is_preempted_only_behind_them(tiny_checkpoint) -> None:
    """How many of them count is not known yet: what it computed would be counted anew, for whoever has its slots."""
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(40, seed), ANSWER) for seed in (1, 2)]
    expected = [generate(small_engine(path), each) for each in asked]
    built = drafting_engine_of(path, always_right(*map(text, asked, expected)), 7, 9, overlap=True)
    (slow,) = stepped(built, asked[:1], 5)
    built.engine.pause(slow.sequence)
    other = submit(built, asked[1])
    built.engine.admit()
    assert built.engine.preemptions == 0 and other.sequence.claim is None, "there is no room for both"
    serve(built, other)
    assert built.engine.preemptions == 1
    built.engine.unpause(slow.sequence)
    serve(built, slow)
    assert [slow.tokens, other.tokens] == [run.tokens for run in expected]
    assert_nothing_in_use(built)


def test_drafts_of_a_step_that_found_too_little_memory_are_forgotten(tiny_checkpoint) -> None:
    """No step is under way: who is paused now can be preempted."""
    path, asked = tiny_checkpoint("granite"), request(random_prompt(40), ANSWER)
    expected = generate(small_engine(path), asked)
    built = drafting_engine(path, always_right(text(asked, expected)), overlap=True)
    fail_launches(built, lambda inputs: any(each.has_drafts for each in inputs))
    run = submit(built, asked)
    while not built.engine.shortages:
        steps(built, 1)
    assert run.sequence.drafts == ()
