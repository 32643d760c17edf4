"""Bad words of several tokens: which ids they ban, known to the host or pending, and answers without them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sampling.bad_words import BadWords
from headrace.request import BadWord
from tests.support.engine.driving import GREEDY, generate, request, run_all, small_engine, submit
from tests.support.engine.oracle import random_prompt

WORDS = BadWords([(1, 2), (1, 3, 4), (3, 4, 5)])
ids = st.integers(0, 3)
words = st.lists(st.lists(ids, min_size=2, max_size=4).map(tuple), max_size=5)


def test_the_token_that_would_complete_a_word_is_banned() -> None:
    assert WORDS.banned([9, 1], 0) == [2]
    assert WORDS.banned([1, 3], 0) == [4]
    assert WORDS.banned([3, 9], 0) == []
    assert WORDS.banned([], 0) == []


def test_the_prompt_is_no_part_of_a_word() -> None:
    assert WORDS.banned([9, 1], 2) == []
    assert WORDS.banned([1, 3], 1) == []
    assert WORDS.banned_after([1], 1) == [(1, 2)]


def test_a_pending_token_bans_by_what_it_turns_out_to_be() -> None:
    assert WORDS.banned_after([9], 0) == [(1, 2)]
    assert WORDS.banned_after([1], 0) == [(1, 2), (3, 4)]
    assert WORDS.banned_after([3], 0) == [(1, 2), (4, 5)]


@given(words, st.lists(ids, max_size=6), ids, st.integers(0, 6))
def test_bans_of_a_pending_token_are_those_of_the_known_one(words, tokens, pending: int, start: int) -> None:
    start = min(start, len(tokens))
    bad = BadWords(words)
    after = [token_id for before, token_id in bad.banned_after(tokens, start) if before == pending]
    assert sorted(after) == sorted(bad.banned([*tokens, pending], start))


@given(words, st.lists(ids, max_size=12))
def test_tokens_that_are_never_banned_contain_no_bad_word(words, tokens) -> None:
    bad, answer = BadWords(words), []
    for token_id in tokens:
        if token_id not in bad.banned(answer, 0):
            answer.append(token_id)
    spans = {tuple(answer[i : i + n]) for i in range(len(answer)) for n in (2, 3, 4)}
    assert not spans & set(words)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_avoids_its_bad_words_and_a_moved_one_goes_on_alike(overlap: bool, tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(30)
    free = generate(small_engine(path), request(prompt, GREEDY)).tokens
    bad = replace(GREEDY, bad_words=tuple(BadWord(tuple(word)) for word in (free[1:3], free[4:7], free[9:10])))
    expected = generate(small_engine(path), request(prompt, bad)).tokens
    for word in bad.bad_words:
        assert not occurs(word.tokens, expected)
    assert expected[:2] == free[:2], "changed more than the bad words"
    built = small_engine(path, overlap=overlap)
    runs = [submit(built, request(prompt, sampling)) for sampling in (bad, GREEDY, bad)]
    run_all(built)
    assert [run.tokens for run in runs] == [expected, free, expected]
    moved = replace(request([*prompt, *expected[:5]], bad), num_prompt_tokens=len(prompt))
    assert generate(small_engine(path, overlap=overlap), moved, max_new=11).tokens == expected[5:]


def occurs(word, tokens) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == tuple(word) for i in range(len(tokens)))
