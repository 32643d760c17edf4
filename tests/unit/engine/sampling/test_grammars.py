"""Answers that obey a grammar: what any engine step, hand-over or preemption makes of them."""

import json
from dataclasses import replace

import pytest

from headrace.answer_grammar import AnswerGrammar
from headrace.engine.intake import BadRequest
from headrace.engine.sequence import Failed, Finished, Sampled
from headrace.grammar import json_grammar, lark_grammar, regex_grammar
from headrace.request import FinishReason, Sampling
from tests.support.engine.driving import (
    Run,
    assert_nothing_in_use,
    engine_of,
    generate,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt
from tests.support.engine.tiny_checkpoints import END_OF_TEXT_ID, TURN_END_ID, build_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["stream", "river", "canal"]},
        "depths": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "kind", "depths", "open"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Sampling(max_tokens=200, seed=3, temperature=0.0, grammar=json_grammar(SCHEMA))
RANDOM = replace(JSON, temperature=1.5, top_p=0.95)
FREE = replace(RANDOM, grammar=None, max_tokens=30, ignore_eos=True)
ENDS = (END_OF_TEXT_ID, TURN_END_ID)
TOKENIZER = build_tokenizer()


def text(run: Run) -> str:
    return TOKENIZER.decode(run.tokens, skip_special_tokens=True)


def assert_obeys(run: Run) -> None:
    assert run.events[-1] == Finished(FinishReason.STOP)
    answer = json.loads(text(run))
    assert set(answer) == set(SCHEMA["properties"])
    assert answer["kind"] in ("stream", "river", "canal")
    assert len(answer["name"]) <= 6 and len(answer["depths"]) <= 3 and isinstance(answer["open"], bool)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_obey_their_grammars_beside_others_that_have_none(overlap: bool, tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    alone = [generate(small_engine(path), request(random_prompt(20, n), s)) for n, s in enumerate((JSON, RANDOM, FREE))]
    built = small_engine(path, overlap=overlap)
    runs = [submit(built, request(random_prompt(20, n), s)) for n, s in enumerate((JSON, RANDOM, FREE))]
    serve(built, *runs)
    assert [run.tokens for run in runs] == [run.tokens for run in alone]
    assert_obeys(runs[0])
    assert_obeys(runs[1])


def test_many_seeds_give_as_many_answers(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    runs = [submit(built, request(random_prompt(9), replace(RANDOM, seed=seed))) for seed in range(24)]
    serve(built, *runs)
    for run in runs:
        assert_obeys(run)
    assert len({text(run) for run in runs}) == 24


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_answer_goes_on_by_its_grammar(overlap: bool, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(20, seed), RANDOM) for seed in (1, 2)]
    expected = [generate(small_engine(path), each).tokens for each in asked]
    built = engine_of(path, num_blocks=7, num_slots=8, overlap=overlap)
    runs = [submit(built, each) for each in asked]
    serve(built, *runs)
    assert built.engine.preemptions
    assert [run.tokens for run in runs] == expected


def test_an_answer_goes_on_by_its_grammar_on_another_node(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    asked = request(random_prompt(20), RANDOM)
    tokens = generate(small_engine(path), asked).tokens
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        moved = replace(asked, tokens=asked.tokens.followed_by(tokens[:cut]))
        assert generate(small_engine(path), moved).tokens == tokens[cut:]


def test_a_token_from_the_prefill_node_counts(tiny_checkpoint) -> None:
    """And it may be all there is."""
    path = tiny_checkpoint("granite")
    one_token = replace(RANDOM, grammar=lark_grammar('start: "a" | "b"'))
    run = generate(small_engine(path), request(random_prompt(20), one_token), max_new=1)
    assert text(run) in ("a", "b")
    [sampled] = [event for event in run.events if isinstance(event, Sampled)]
    assert sampled.finish is FinishReason.STOP


def test_an_answer_so_far_that_breaks_its_grammar_is_refused(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    asked = request(random_prompt(20), JSON)
    with pytest.raises(BadRequest, match="the answer so far does not follow its grammar"):
        submit(built, replace(asked, tokens=asked.tokens.followed_by(TOKENIZER.encode("x")[:1])))


def test_an_end_of_sequence_comes_where_the_grammar_accepts_and_not_before(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    wanted = replace(RANDOM, grammar=regex_grammar("(ab)*"), max_tokens=90)
    runs = [submit(built, request(random_prompt(9), replace(wanted, seed=seed))) for seed in range(12)]
    serve(built, *runs)
    for run in runs:
        if run.events[-1] == Finished(FinishReason.STOP):
            assert run.tokens[-1] in ENDS and text(run) == "ab" * (len(text(run)) // 2)
        else:
            assert len(run.tokens) == 90 and text(run).startswith("ababab")
    assert Finished(FinishReason.STOP) in [run.events[-1] for run in runs]


@pytest.mark.parametrize("settings", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_an_unwanted_end_is_taken_where_the_grammar_leaves_nothing_else(settings, tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    bounded = replace(RANDOM, grammar=regex_grammar("(a|b){0,5}"), max_tokens=60, **settings)
    run = generate(built, request(random_prompt(9), bounded))
    assert len(text(run)) == 5
    assert run.events[-1] == Finished(FinishReason.STOP)


def test_min_tokens_keeps_an_answer_going_that_could_end(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    longer = replace(RANDOM, grammar=regex_grammar("(a|b)*"), min_tokens=20, max_tokens=60)
    for seed in range(6):
        assert len(generate(built, request(random_prompt(9), replace(longer, seed=seed))).tokens) >= 20


def test_logprobs_are_the_models_own(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    prompt = random_prompt(20)
    free = generate(built, request(prompt, replace(FREE, logprobs=2, max_tokens=1)))
    held = generate(built, request(prompt, replace(JSON, logprobs=2)))
    tops = [next(e.token.logprobs.top for e in run.events if isinstance(e, Sampled)) for run in (free, held)]
    assert [top.id for top in tops[0]] == [top.id for top in tops[1]]
    assert [top.logprob for top in tops[0]] == pytest.approx([top.logprob for top in tops[1]], abs=1e-4)


def test_penalties_count_what_the_grammar_let_through(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    asked = request(random_prompt(20), replace(RANDOM, repetition_penalty=1.4, frequency_penalty=0.5))
    answers = [generate(small_engine(path, overlap=overlap), asked) for overlap in (False, True)]
    assert answers[0].tokens == answers[1].tokens
    assert_obeys(answers[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_grows_beyond_its_limits_ends_its_answer_and_no_other(
    overlap: bool, tiny_checkpoint, monkeypatch
) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=overlap)
    confused, other = (submit(built, request(random_prompt(20), JSON)) for _ in range(2))
    broken: list[AnswerGrammar] = []
    error = AnswerGrammar.error.fget
    monkeypatch.setattr(AnswerGrammar, "error", property(lambda self: "too big" if self in broken else error(self)))
    while len(confused.tokens) < 5:
        built.engine.admit()
        built.engine.step()
    broken.append(confused.sequence.grammar)
    run_all(built)
    assert "the answer cannot go on by it: too big" in str(
        next(e.error for e in confused.events if isinstance(e, Failed))
    )
    assert_obeys(other)
    assert len(confused.tokens) < len(other.tokens)


def test_a_grammar_without_a_first_mask_keeps_no_slot_for_a_checkpoint(tiny_checkpoint, monkeypatch) -> None:
    built = small_engine(tiny_checkpoint("granite"), checkpoint_policy="every")
    run = submit(built, request(random_prompt(60), JSON))
    monkeypatch.setattr(AnswerGrammar, "error", property(lambda self: "too big"))
    built.engine.admit()
    built.engine.step()
    built.engine.release(run.sequence)
    assert_nothing_in_use(built)


def test_a_folder_without_a_tokenizer_refuses_grammars(tiny_checkpoint, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_checkpoint("granite").iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    with pytest.raises(BadRequest, match=r"tokenizer\.json: no tokenizer that grammars can use"):
        submit(small_engine(folder), request(random_prompt(9), JSON))


def test_a_grammar_that_breaks_in_a_prompts_last_step_ends_its_request_alone(tiny_checkpoint, monkeypatch) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    engine = built.engine
    other = submit(built, request(random_prompt(20), replace(FREE, max_tokens=16)))
    while len(other.tokens) < 2:
        engine.admit()
        engine.step()
    broken = submit(built, request(random_prompt(64, 5), JSON, boundaries=(32,)))
    error = AnswerGrammar.error.fget  # type: ignore[attr-defined]
    is_broken = lambda grammar: "too big" if grammar is broken.sequence.grammar else error(grammar)  # noqa: E731
    monkeypatch.setattr(AnswerGrammar, "error", property(is_broken))
    engine.admit()
    engine.step()
    assert isinstance(broken.events[-1], Failed)
    engine.release(broken.sequence)
    run_all(built)
    engine.release(other.sequence)
    assert len(other.tokens) == 16
    assert_nothing_in_use(built)
