"""Compiled grammars and their masks, against llguidance's own word on single tokens."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headrace import answer_grammar, grammar
from headrace.answer_grammar import TOKEN_LIMIT_S, AnswerGrammar, GrammarTime
from headrace.grammar import (
    GrammarError,
    Grammars,
    client_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from headrace.kernels.sampling.argmax import NO_TOKEN
from tests.support.engine.tiny_checkpoints import END_OF_TEXT_ID, TURN_END_ID, VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer()


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    return made_grammars(tmp_path, num_threads=2)


def made_grammars(folder: Path, num_threads: int) -> Grammars:
    TOKENIZER.save_pretrained(folder)
    return Grammars(folder / "tokenizer.json", VOCAB_SIZE, (END_OF_TEXT_ID, TURN_END_ID), num_threads)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def allowed(grammars: Grammars, answers: list[AnswerGrammar], banned: list[tuple[int, ...]]) -> list[set[int]]:
    masks = np.full((len(answers), -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)  # what was there before does not matter
    grammars.fill_masks(answers, [()] * len(answers), banned, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.nonzero(row)[0].tolist()) for row in bits]


def test_a_mask_has_exactly_the_tokens_that_may_follow(grammars: Grammars):
    texts = [json_grammar({"type": "object"}), regex_grammar("(the river )*"), lark_grammar('start: "a" | "an"')]
    answers = [grammars.answer(texts[0], ids('{"a": ')), grammars.answer(texts[1]), grammars.answer(texts[2], ids("a"))]
    found = allowed(grammars, answers, [(), (), ()])
    for answer, mask in zip(answers, found, strict=True):
        assert mask == {n for n in range(VOCAB_SIZE) if answer.matcher.validate_tokens([n])}
    assert {END_OF_TEXT_ID, TURN_END_ID} <= found[1]
    assert not {END_OF_TEXT_ID, TURN_END_ID} & found[0]


def test_an_unwanted_token_is_left_out_unless_nothing_else_is_left(grammars: Grammars):
    ends = (END_OF_TEXT_ID, TURN_END_ID)
    open_ended, whole = grammars.answer(regex_grammar("a*"), ids("a")), grammars.answer(regex_grammar("a"), ids("a"))
    found = allowed(grammars, [open_ended, whole], [ends, ends])
    assert found[0] and not found[0] & set(ends)
    assert found[1] == set(ends)
    assert (open_ended.is_complete, whole.is_complete) == (False, True)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_answers_by_one_grammar_have_masks_of_their_own(num_threads: int, tmp_path: Path):
    grammars, text = made_grammars(tmp_path, num_threads), json_grammar({"type": "object"})
    starts = [ids('{"a": [1, "the river", {"b": null}]'[:length]) for length in range(35)]
    found = allowed(grammars, [grammars.answer(text, start) for start in starts], [()] * 35)
    assert found == [allowed(grammars, [grammars.answer(text, start)], [()])[0] for start in starts]
    assert len({frozenset(mask) for mask in found}) > 5


def test_a_grammar_of_many_answers_is_compiled_for_each_thread_and_no_more(grammars: Grammars):
    text = regex_grammar("(the river )*")
    few = [grammars.answer(text) for _ in range(grammar.SHARED_BY)]
    assert len({answer.compiled for answer in few}) == 1
    many = [grammars.answer(text) for _ in range(4 * grammar.SHARED_BY)]
    assert len({answer.compiled for answer in [*few, *many]}) == 2
    del few, many
    assert len({grammars.answer(text).compiled for _ in range(4 * grammar.SHARED_BY)}) == 1


def test_an_answer_that_has_left_its_grammar_spoils_no_mask_beside_it(grammars: Grammars):
    text = regex_grammar("(the river )*")
    lost, other = grammars.answer(text), grammars.answer(text)
    before = allowed(grammars, [other], [()])
    lost.append(ids("7"))
    assert lost.error is not None
    assert allowed(grammars, [lost, other], [(), ()])[1:] == before
    assert not other.is_spent and grammars.answer(text).error is None


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "maxItems": 1.0, "uniqueItems": False}, "[1]", "[1,1]"),
        ({"type": "integer", "then": {"const": 1}, "else": {"const": 2}}, "3", '"a"'),
        ({"type": "integer", "if": {"const": 1}}, "3", '"a"'),
        ({"type": "array", "minContains": 2, "items": {"type": "integer"}}, "[]", '["a"]'),
        ({"type": "object", "unevaluatedProperties": True, "required": ["a"]}, '{"a":1}', "{}"),
        ({"type": "object", "properties": {"uniqueItems": False, "then": {"const": 1}}}, '{"then":1}', '{"then":2}'),
        ({"type": "object", "properties": {"uniqueItems": False}}, "{}", '{"uniqueItems":1}'),
        ({"const": {"uniqueItems": False, "if": 1}}, '{"uniqueItems":false,"if":1}', "{}"),
    ],
)
def test_keywords_that_say_nothing_are_no_reason_to_refuse(grammars: Grammars, schema: object, right: str, wrong: str):
    text = json_grammar(schema)
    grammar.check_grammar(text)
    assert (accepts(grammars, text, right), accepts(grammars, text, wrong)) == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"if": {"const": 1}, "then": {"const": 1}},
        {"contains": {"const": 1}, "minContains": 2},
        {"unevaluatedProperties": False},
        {"allOf": [{"then": {}}, {"$ref": "#/allOf/0/then"}]},
    ],
)
def test_keywords_that_say_something_are_not_left_out(schema: object):
    with pytest.raises(GrammarError):
        grammar.check_grammar(json_grammar(schema))


def accepts(grammars: Grammars, text: str, document: str) -> bool:
    matcher = grammars.answer(text).matcher
    tokens = ids(document)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_answers_of_one_grammar_go_their_own_ways(grammars: Grammars):
    text = lark_grammar('start: "yes" | "no"')
    first, second = grammars.answer(text), grammars.answer(text)
    first.append(ids("yes"))
    assert (first.is_complete, second.is_complete) == (True, False)
    second.append(ids("maybe"))
    assert second.error is not None and not second.is_complete
    assert (first.error, grammars.answer(text, ids("no")).error) == (None, None)


def test_drafts_end_where_a_rule_has_its_most_tokens(grammars: Grammars):
    answer = grammars.answer(lark_grammar('start: word "!"\nword[max_tokens=3]: /[a-z]*/'))
    tokens = [token for letter in "abcde" for token in ids(letter)]
    assert answer.allowed(tokens) == tokens[:3]
    assert answer.allowed([*tokens[:2], NO_TOKEN, tokens[2]]) == tokens[:2], "a layer drafts it from NaN"
    answer.append(tokens[:2])
    assert answer.allowed(tokens[2:]) == tokens[2:3]


def test_no_more_grammars_are_kept_than_there_is_room_for(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "KEPT_GRAMMARS", 3)
    texts = [regex_grammar(f"a{number}") for number in range(5)]
    for text in texts:
        grammars.answer(text)
    grammars.answer(texts[2])
    grammars.answer(regex_grammar("b"))
    assert list(grammars._compiled) == [texts[4], texts[2], regex_grammar("b")]
    monkeypatch.setattr(grammar, "KEPT_TEXT_BYTES", 1000)
    grammars.answer(regex_grammar("c" * 900))
    assert len(grammars._compiled) == 1


def test_what_cannot_be_compiled_is_refused(grammars: Grammars):
    with pytest.raises(GrammarError, match='unknown name: "b"'):
        grammars.answer(lark_grammar('start: "a" b'))
    with pytest.raises(GrammarError, match="unknown special token"):
        grammars.answer(lark_grammar("start: <|nothing|>"))


def ambiguous(before: str, num_rules: int = 40) -> str:
    """A grammar of which each text has very many derivations: llguidance takes 1.8 s for its first mask here."""
    rules = [f"r{n}: s s | /[a-z]/" for n in range(num_rules)]
    return lark_grammar(
        "\n".join([f"start: {before} s", *rules, "s: " + " | ".join(f"r{n}" for n in range(num_rules))])
    )


def test_a_grammar_that_takes_too_long_to_follow_is_refused():
    with pytest.raises(GrammarError, match="takes too long to follow"):
        grammar.check_grammar(ambiguous(""))
    with pytest.raises(GrammarError, match="Current row has 2501 items"):
        grammar.check_grammar(lark_grammar("start: " + " | ".join(f'"{n}"' for n in range(2500))))
    grammar.check_grammar(ambiguous("/[0-9]{100}/"))  # what is hidden so well is found by the nodes


def test_an_answer_whose_masks_take_too_long_ends_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "WORK_LIMIT_S", 0.02)
    slow, plain = grammars.answer(ambiguous('"7"', 200), ids("7")), grammars.answer(regex_grammar("(the river )*"))
    found = allowed(grammars, [slow, plain], [(), ()])
    assert "more than 5 ms a token" in (slow.error or "")
    assert not slow.is_complete and not slow.forced() and not slow.allowed(ids("a"))
    slow.append(ids("a"))
    assert found[1] == {n for n in range(VOCAB_SIZE) if plain.matcher.validate_tokens([n])}
    assert allowed(grammars, [slow, plain], [(), ()])[1] == found[1]
    with pytest.raises(GrammarError, match="took too much time in another answer"):
        grammars.answer(ambiguous('"7"', 200))


def test_with_a_mask_that_takes_too_long_all_answers_by_its_grammar_end(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    """The thread that computes it goes on and keeps a lock on what they share: to follow a token would wait for it."""
    monkeypatch.setattr(grammar, "WORK_LIMIT_S", 0.02)
    text = ambiguous('"7"', 200)
    slow, *others = (grammars.answer(text) for _ in range(2 * grammar.SHARED_BY))
    slow.append(ids("7"))
    assert all(other.error is None for other in others)
    allowed(grammars, [slow, others[0]], [(), ()])
    for other in others:
        other.append(ids("7"))
        assert "more than 5 ms a token" in (other.error or "")


def many_ways_to_one_text(num_rules: int, num_doublings: int) -> str:
    """Lark of `a` so many times, and nothing else: with 200 rules and 6 doublings, llguidance takes 1.7 s to see it."""
    lines = [f"start: s{num_doublings}", 's0: "aa"']
    for n in range(1, num_doublings + 1):
        lines.append(f"s{n}: " + " | ".join(f"r{n}x{number}" for number in range(num_rules)))
        lines += [f"r{n}x{number}: s{n - 1} s{n - 1}" for number in range(num_rules)]
    return "\n".join(lines)


def test_ahead_of_a_clients_grammar_nothing_is_looked_up(grammars: Grammars):
    lark = many_ways_to_one_text(20, 4)
    client, own = grammars.answer(client_grammar(lark)), grammars.answer(lark_grammar(lark))
    assert own.takes_drafts and TOKENIZER.decode(own.forced()).startswith("a" * 20)
    assert [*own.allowed(ids("aaaa"))] == ids("aaaa")
    assert (client.takes_drafts, client.forced(), client.allowed(ids("aaaa"))) == (False, [], ())
    assert client.time.seconds == 0
    assert allowed(grammars, [client], [()]) == allowed(grammars, [own], [()])


def test_time_spent_on_forced_tokens_is_the_answers(grammars: Grammars):
    slow = grammars.answer(lark_grammar(many_ways_to_one_text(200, 6)))
    # They are found once more, and have taken more than the whole allowance.
    assert slow.forced() and slow.error is not None
    assert slow.forced() == []


def test_drafts_behind_one_that_took_long_are_not_looked_at(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    quick_s, long_s = 0.5 * TOKEN_LIMIT_S, 1.5 * TOKEN_LIMIT_S
    clock = SimpleNamespace(
        perf_counter=iter([0, quick_s, quick_s + long_s]).__next__, thread_time=iter([0, long_s]).__next__
    )
    monkeypatch.setattr(answer_grammar, "time", clock)
    answer = grammars.answer(regex_grammar("(a|b)*"))
    assert answer.allowed(ids("a") + ids("b") + ids("a")) == ids("a")
    assert answer.time.seconds == long_s


def test_a_draft_that_really_takes_long_is_not_allowed(grammars: Grammars):
    slow = grammars.answer(ambiguous('"7"', 200))
    tokens = [token for letter in "7abc" for token in ids(letter)]
    assert len(slow.allowed(tokens)) < len(tokens)  # by its grammar they all are
    assert slow.time.seconds > 0


def test_a_mask_behind_drafts_is_the_mask_after_these_tokens(grammars: Grammars):
    answer, later = (grammars.answer(regex_grammar("the (river|road)"), ids(text)) for text in ("", "the r"))
    masks = np.zeros((3, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    grammars.fill_masks([answer, answer, later], [(), ids("the r"), ()], [()] * 3, masks)
    assert (masks[1] == masks[2]).all() and (masks[0] != masks[1]).any()
    assert answer.error is None and answer.matcher.validate_tokens(ids("the r")) == len(ids("the r"))


def test_masks_that_are_each_quick_enough_may_be_too_slow_together():
    time_of = GrammarTime()
    for _ in range(1000):
        time_of.add(0.004)
    assert not time_of.is_spent
    for _ in range(200):
        time_of.add(0.02)
    assert time_of.is_spent


def test_a_node_full_of_grammars_that_were_given_up_takes_no_new_one(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    known = grammars.answer(regex_grammar("a"))
    monkeypatch.setattr(grammar, "MOST_LEFT_BEHIND", 0)
    with pytest.raises(GrammarError, match="were given up still take this node's time"):
        grammars.answer(regex_grammar("b"))
    assert grammars.answer(regex_grammar("a")).error is known.error is None
