"""How many tokens an engine drafts: what grammars force, and what pays. Steps overlap where nothing is drafted."""

from dataclasses import replace

import pytest

from headrace.answer_grammar import AnswerGrammar
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Failed, Sampled
from headrace.grammar import client_grammar, lark_grammar, regex_grammar
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.drafters import (
    KnownAnswers,
    always_right,
    always_wrong,
    drafting_engine,
    drafting_engine_of,
    sometimes_wrong,
)
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

ANSWER = replace(GREEDY, max_tokens=40)
PENALISED = replace(ANSWER, repetition_penalty=1.3, frequency_penalty=0.3)
"""Greedy: which steps draft depends on measured times, and a random draw may lie within a rounding of two tokens."""


def together(built: BuiltEngine, asked: list) -> list[Run]:
    runs = [submit(built, each) for each in asked]
    serve(built, *runs)
    assert_nothing_in_use(built)
    return runs


def text(asked, run: Run) -> list[int]:
    return [*asked.tokens, *run.tokens]


def launches_before_tokens(built: BuiltEngine) -> list[str]:
    """What the engine does from now on: `launch` and `token`, in order."""
    order: list[str] = []
    launch = built.engine._runner.launch
    built.engine._runner.launch = lambda *step: (order.append("launch"), launch(*step))[1]
    return order


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", [always_right, always_wrong, sometimes_wrong])
def test_answers_are_those_without_drafts(drafter, overlap: bool, tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    asked = [request(random_prompt(n), sampling) for n in (1, 17, 65) for sampling in (ANSWER, PENALISED)]
    expected = together(small_engine(path), asked)
    built = drafting_engine(path, drafter(*map(text, asked, expected)), count="auto", overlap=overlap)
    assert [run.tokens for run in together(built, asked)] == [run.tokens for run in expected]
    assert built.engine.drafting.drafted_tokens > 0


def test_preempted_answers_are_those_without_drafts(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(n), replace(PENALISED, max_tokens=100)) for n in (100, 101, 102, 103)]
    expected = together(small_engine(path), asked)
    drafter = sometimes_wrong(*map(text, asked, expected))
    scarce = drafting_engine_of(path, drafter, 36, 9, count="auto", overlap=True)
    assert [run.tokens for run in together(scarce, asked)] == [run.tokens for run in expected]
    assert scarce.engine.preemptions > 0


def test_wrong_drafts_are_given_up(tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20), replace(ANSWER, max_tokens=300))
    known = text(asked, generate(small_engine(path), asked))
    built = drafting_engine(path, always_wrong(known), count="auto")
    generate(built, asked)
    assert 0 < built.engine.drafting.drafted_tokens < 100  # three a step would be 900


def test_steps_overlap_where_nothing_is_drafted(tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20), ANSWER)
    known = text(asked, generate(small_engine(path), asked))
    orders = {}
    for name, drafter in {"none": KnownAnswers([]), "some": always_right(known)}.items():
        built = drafting_engine(path, drafter, overlap=True)
        order = launches_before_tokens(built)
        run = submit(built, asked)
        on_event = run.sequence.job.on_event
        note = lambda event, on_event=on_event, order=order: (  # noqa: E731
            order.append("token") if isinstance(event, Sampled) else None,
            on_event(event),
        )
        run.sequence.job = replace(run.sequence.job, on_event=note)
        serve(built, run)
        assert run.tokens == known[20:]
        orders[name] = order
    assert orders["none"][:8] == ["launch", *["launch", "token"] * 3, "launch"]
    # Tokens that drafts follow are known before the next launch, and reported behind it.
    assert orders["some"][:9] == [*["launch"] * 2, "token", "launch", *["token"] * 4, "launch"]


def test_what_a_grammar_forces_is_drafted_without_any_drafter(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    wanted = replace(
        PENALISED, temperature=0.9, ignore_eos=False, grammar=regex_grammar(r'\{"temperature":[0-9],"unit":"(C|F)"\}')
    )
    asked = [request(random_prompt(20), replace(wanted, seed=seed)) for seed in range(4)]
    expected = together(small_engine(path), asked)
    for overlap in (False, True):
        speculation = SpeculationConfig("grammar", "fixed", 8)
        built = small_engine(path, speculation=speculation, overlap=overlap, max_step_tokens=512)
        assert [run.tokens for run in together(built, asked)] == [run.tokens for run in expected]
        drafting, length = built.engine.drafting, sum(len(run.tokens) for run in expected)
        assert drafting.drafted_tokens >= drafting.accepted_tokens > length // 2


def test_nothing_is_drafted_by_a_grammar_that_a_client_wrote(tiny_checkpoint) -> None:
    path, lark = tiny_checkpoint("granite"), 'start: "abcdef" /[0-9]/ "abcdef"'
    speculation = SpeculationConfig("grammar", "fixed", 8)
    drafted, tokens = [], []
    for text in (lark_grammar(lark), client_grammar(lark)):
        built = small_engine(path, speculation=speculation, max_step_tokens=512)
        (run,) = together(built, [request(random_prompt(20), replace(PENALISED, ignore_eos=False, grammar=text))])
        drafted.append(built.engine.drafting.drafted_tokens)
        tokens.append(run.tokens)
    assert drafted[0] > 0 and drafted[1] == 0
    assert tokens[0] == tokens[1]


def test_nothing_is_drawn_by_a_grammar_that_broke_within_a_step(tiny_checkpoint, monkeypatch) -> None:
    """Masks behind it mean nothing, though the drafts there would be taken."""
    path = tiny_checkpoint("granite")
    asked = request(random_prompt(20), replace(ANSWER, ignore_eos=False, grammar=regex_grammar("(ab|ba){3,9}c?")))
    known = text(asked, generate(small_engine(path), asked))
    built = drafting_engine(path, always_right(known))
    run = submit(built, asked)
    error = AnswerGrammar.error.fget
    is_broken = property(
        lambda self: "too big" if self is run.sequence.grammar and len(run.tokens) > 2 else error(self)
    )
    monkeypatch.setattr(AnswerGrammar, "error", is_broken)
    while not isinstance(run.events[-1:] and run.events[-1], Failed):
        built.engine.admit()
        built.engine.step()
    assert run.tokens == known[20:23]
    built.engine.release(run.sequence)
    assert_nothing_in_use(built)


def test_no_draft_takes_a_step_beyond_a_wanted_gap(tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20), ANSWER)
    known = text(asked, generate(small_engine(path), asked))
    built = drafting_engine(path, always_right(known))
    for gap_s, is_drafted in ((1e-6, False), (1e6, True)):
        assert generate(built, replace(asked, token_gap_s=gap_s)).tokens == known[20:]
        assert (built.engine.drafting.drafted_tokens > 0) == is_drafted
