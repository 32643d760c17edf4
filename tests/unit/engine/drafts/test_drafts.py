"""Drafts in the engine's steps: the same answers as without, whatever was drafted, and the same things cached."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Finished, Sampled
from headrace.grammar import regex_grammar
from headrace.request import BadWord, FinishReason, Request, Sampling
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.drafters import (
    DRAFTERS,
    ROOMY,
    KnownAnswers,
    always_right,
    always_wrong,
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
    engine_of,
    generate,
    request,
    run_all,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

FAMILIES = ("granite", "granite_moe", "qwen35", "qwen35_moe", "qwen3_next")
LENGTHS = (1, 16, 17, 65)
ANSWER = replace(GREEDY, max_tokens=40)
RANDOM = Sampling(max_tokens=40, seed=7, temperature=0.9, top_p=0.95, ignore_eos=True)
PENALISED = replace(RANDOM, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


@cache  # for every drafter
def plain_answers(path: Path) -> tuple[BuiltEngine, list[Request], list[Run]]:
    """An engine without drafts, and its answers to requests that it served together."""
    plain = small_engine(path)
    asked = [request(random_prompt(n), sampling) for n in LENGTHS for sampling in (ANSWER, RANDOM)]
    return plain, asked, together(plain, asked)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_without_drafts(family: str, drafter, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    plain, asked, expected = plain_answers(path)
    built = drafting_engine(path, drafter(*map(text, asked, expected)), cache_bytes=ROOMY)
    runs = together(built, asked)
    assert [run.tokens for run in runs] == [run.tokens for run in expected]
    drafted, accepted = num_drafted(built)
    assert drafted > 0
    assert (accepted == 0) == (drafter is always_wrong)
    assert (accepted == drafted) == (drafter is always_right)
    assert built.engine.sampled_tokens == plain.engine.sampled_tokens
    assert built.engine.computed_tokens == plain.engine.computed_tokens


def test_right_drafts_save_steps(tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20), ANSWER)
    known = text(asked, generate(small_engine(path), asked))
    built = drafting_engine(path, always_right(known), max_drafts=3)
    run, num_steps = submit(built, asked), 0
    while not run.is_finished:
        steps(built, 1)
        num_steps += 1
    assert num_steps == 1 + 10  # the prompt, and 39 more tokens, four in a step


def test_an_engine_that_overlaps_its_steps_gives_the_same_answers(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    asked = [request(random_prompt(n), sampling) for n in LENGTHS for sampling in (RANDOM, PENALISED)]
    expected = together(small_engine(path), asked)
    some = list(map(text, asked, expected))[::2]  # nothing is drafted for the others
    built = drafting_engine(path, sometimes_wrong(*some), overlap=True, cache_bytes=ROOMY)
    assert [run.tokens for run in together(built, asked)] == [run.tokens for run in expected]
    assert num_drafted(built)[1] > 0


REPEATING = {"bias_ids": (7, 9, 11), "bias_values": (30.0, 30.0, 30.0)}
"""Settings of an answer of three tokens: so short a vocabulary says the same again and again."""


@cache  # for every drafter
def plain_repeating_chat(path: Path) -> tuple[BuiltEngine, list[tuple[Request, Run]]]:
    """An engine without drafts, and the turns of a chat that says the same again and again."""
    plain, prompt, chat = small_engine(path), random_prompt(12) * 4, []
    for turn, sampling in enumerate((ANSWER, RANDOM, PENALISED, ANSWER, ANSWER)):
        asked = request(prompt, replace(sampling, **REPEATING))
        chat.append((asked, generate(plain, asked)))
        prompt = [*text(*chat[-1]), *random_prompt(9, turn)]
    return plain, chat


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_from_text_change_no_token_of_a_chat_and_no_hit(family: str, drafter: str, tiny_checkpoint) -> None:
    path, speculation = tiny_checkpoint(family), SpeculationConfig(drafter, "fixed", 4)
    plain, chat = plain_repeating_chat(path)
    built = small_engine(path, speculation=speculation)
    for asked, expected in chat:
        run = generate(built, asked)
        assert run.tokens == expected.tokens
        assert run.sequence.num_prefilled == expected.sequence.num_prefilled
    drafted, accepted = num_drafted(built)
    assert 0 < accepted <= drafted
    assert contents(built) == contents(plain)


def test_an_answer_drafts_for_the_next_ones_of_its_tenant_alone(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path, speculation=SpeculationConfig("suffix", "fixed", 3))
    asked = request(random_prompt(20), ANSWER)
    answers, accepted = [], [0]
    for salt in (b"one", b"two", b"one", b"two"):
        answers.append(generate(built, replace(asked, salt=salt)).tokens)
        accepted.append(num_drafted(built)[1])
    gained = [after - before for before, after in pairwise(accepted)]
    assert gained[0] == gained[1] < gained[2] == gained[3]
    assert answers == [answers[0]] * 4


SETTINGS = {
    "penalties": PENALISED,
    "top_k and min_p": replace(RANDOM, top_k=20, min_p=0.02),
    "bias": replace(RANDOM, bias_ids=(7, 9), bias_values=(2.0, -3.0)),
    "greedy penalties": replace(ANSWER, repetition_penalty=1.5, frequency_penalty=0.5),
    "logprobs": replace(PENALISED, logprobs=2),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_draws_as_without_drafts(name: str, drafter, tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("qwen35"), request(random_prompt(20), SETTINGS[name])
    expected = generate(small_engine(path), asked)
    built = drafting_engine(path, drafter(text(asked, expected)))
    run = generate(built, asked)
    assert run.tokens == expected.tokens
    assert num_drafted(built)[0] > 0
    ours, theirs = ([event.token for event in each.events if isinstance(event, Sampled)] for each in (run, expected))
    for token, other in zip(ours, theirs, strict=True):
        if token.logprobs is not None:
            assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert [each.id for each in token.logprobs.top] == [each.id for each in other.logprobs.top]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_bad_words_and_early_stops_are_refused_among_drafts(drafter, tiny_checkpoint) -> None:
    """The drafts are the answer without these settings: they would be taken if only their first row obeyed."""
    path, prompt = tiny_checkpoint("granite"), random_prompt(20)
    free = generate(small_engine(path), request(prompt, ANSWER)).tokens
    words = (BadWord(tuple(free[5:7])), BadWord(tuple(free[9:12])))
    stops = (free[3], free[14])
    for sampling in (replace(ANSWER, bad_words=words), replace(ANSWER, stop_token_ids=stops, min_tokens=20)):
        asked = request(prompt, sampling)
        expected = generate(small_engine(path), asked)
        assert expected.tokens != free
        built = drafting_engine(path, drafter([*prompt, *free], text(asked, expected)))
        assert generate(built, asked).tokens == expected.tokens


def test_a_stop_token_counts_from_min_tokens_on_among_drafts(tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(20)
    free = generate(small_engine(path), request(prompt, ANSWER)).tokens
    built = drafting_engine(path, always_right([*prompt, *free]))
    new = [i for i in range(8, 40) if free[i] not in free[:i]][:4]
    for place in new:
        asked = request(prompt, replace(ANSWER, stop_token_ids=(free[place],), min_tokens=place))
        assert generate(built, asked).tokens == free[: place + 1]
    assert len({place % 4 for place in new}) > 1, "in more than one row of a step"


@pytest.mark.parametrize("stop_at", [1, 3, 4, 8])
def test_what_comes_after_a_stop_token_is_dropped(stop_at: int, tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(40)
    free = generate(small_engine(path), request(prompt, ANSWER)).tokens
    stopper = free[stop_at]
    expected = free[: free.index(stopper) + 1]
    asked = request(prompt, replace(ANSWER, stop_token_ids=(stopper,)))
    built = drafting_engine(path, always_right([*prompt, *free]), checkpoint_policy="every")
    run = generate(built, asked)
    assert run.tokens == expected
    assert run.events[-1] == Finished(FinishReason.STOP)
    assert run.sequence.num_computed == len(prompt) + len(expected) - 1
    plain = small_engine(path, checkpoint_policy="every")
    generate(plain, asked)
    assert contents(built) == contents(plain)
    assert_nothing_in_use(built)


def contents(built: BuiltEngine) -> tuple[set, set]:
    found = built.engine.cache.contents()
    return set(found.blocks), set(found.checkpoints)


@cache  # for every drafter
def plain_chat(path: Path, policy: str) -> tuple[BuiltEngine, list[tuple[Request, Run]]]:
    """An engine without drafts, and the turns of its chat."""
    plain = small_engine(path, checkpoint_policy=policy)
    prompt, chat = random_prompt(40), []
    for turn in range(5):
        asked = request(prompt, replace(ANSWER, max_tokens=30))
        chat.append((asked, generate(plain, asked)))
        prompt = [*text(*chat[-1]), *random_prompt(9, turn)]
    return plain, chat


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", ["none", "align", "every", "branch"])
def test_a_chat_of_five_turns_hits_what_it_hits_without_drafts(policy: str, drafter, tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    plain, chat = plain_chat(path, policy)
    built = drafting_engine(path, drafter(*(text(*turn) for turn in chat)), max_drafts=5, checkpoint_policy=policy)
    for asked, expected in chat:
        run = generate(built, asked)
        assert run.tokens == expected.tokens
        assert run.sequence.num_prefilled == expected.sequence.num_prefilled
        assert run.sequence.all_checkpoints == expected.sequence.all_checkpoints
    assert num_drafted(built)[0] > 0
    assert contents(built) == contents(plain)
    assert built.engine.cache.stats().totals == plain.engine.cache.stats().totals


def test_hits_under_eviction_are_those_without_drafts(tiny_checkpoint) -> None:
    """Drafts have slots of their own: they take none from a checkpoint."""
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(50, seed % 5), replace(ANSWER, seed=seed, temperature=1.0)) for seed in range(15)]
    plain = engine_of(path, 30, 6)
    expected = [generate(plain, each) for each in asked]
    built = drafting_engine_of(path, sometimes_wrong(*map(text, asked, expected)), 30, 6)
    assert [generate(built, each).tokens for each in asked] == [run.tokens for run in expected]
    totals = built.engine.cache.stats().totals
    assert totals.checkpoints_evicted > 0 and totals.block_evictions > 0
    assert totals == plain.engine.cache.stats().totals


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_answer_obeys_its_grammar(drafter, overlap: bool, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    wanted = replace(RANDOM, temperature=1.5, ignore_eos=False, grammar=regex_grammar("(ab|ba){3,9}c?"))
    asked = [request(random_prompt(20), replace(wanted, seed=seed)) for seed in range(6)]
    expected = together(small_engine(path), asked)
    # Those of other seeds, too: drafts that the grammar allows, and that are not drawn.
    built = drafting_engine(path, drafter(*map(text, asked, expected)), overlap=overlap, cache_bytes=ROOMY)
    runs = together(built, asked)
    assert [run.tokens for run in runs] == [run.tokens for run in expected]
    assert [run.events[-1] for run in runs] == [Finished(FinishReason.STOP)] * 6
    assert (num_drafted(built)[0] > 0) or drafter is always_wrong


def test_an_answer_of_one_token_is_not_drafted_for(tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(20)
    free = generate(small_engine(path), request(prompt, ANSWER)).tokens
    built = drafting_engine(path, always_right([*prompt, *free]))
    run = submit(built, request(prompt, ANSWER), max_new=1)
    run_all(built)
    assert run.tokens == free[:1] and num_drafted(built) == (0, 0)
    assert run.sequence.num_computed == 20


def test_the_parts_of_a_step_count_its_drafts(tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(20)
    free = generate(small_engine(path), request(prompt, ANSWER)).tokens
    built = drafting_engine(path, KnownAnswers([[*prompt, *free]]))
    shapes = []
    observe = built.engine.cost_fit.observe
    built.engine.cost_fit.observe = lambda shape, seconds, **kind: (shapes.append(shape), observe(shape, seconds))
    generate(built, request(prompt, ANSWER))
    first = shapes[1]
    assert (first.num_decoding, first.context_tokens) == (1, 21)
    assert (first.num_drafts, first.prefill_tokens) == (3, 0)
