"""Drafts from earlier answers: those of the same tenant only, within their bound of memory."""

import random
import tracemalloc

import pytest

from headrace.speculation.ngram import INDEXED_A_CALL, NgramDrafter
from headrace.speculation.suffix import TOKEN_BYTES, Answer, AnswerStore, SuffixDrafter

PROMPT = [90, 91]


def answered(store: AnswerStore, answer: list[int], salt: bytes = b"") -> None:
    """One request, token by token."""
    drafter = SuffixDrafter(store, salt, len(PROMPT))
    for length in range(1, len(answer) + 1):
        drafter.propose([*PROMPT, *answer[:length]], 1)


def drafted(store: AnswerStore, answer: list[int], max_drafts: int = 8, salt: bytes = b"") -> list[int]:
    return SuffixDrafter(store, salt, len(PROMPT)).propose([*PROMPT, *answer], max_drafts)


def test_earlier_answers_are_drafted_from_for_as_many_tokens_as_agree() -> None:
    store = AnswerStore(1 << 20)
    answered(store, list(range(20)))
    assert drafted(store, [2, 3]) == []
    assert drafted(store, [2, 3, 4]) == [5, 6, 7]
    assert drafted(store, [40, 2, 3, 4, 5]) == [6, 7, 8, 9]
    assert drafted(store, [2, 3, 4, 5], 2) == [6, 7]
    assert drafted(store, [16, 17, 18]) == [19]
    assert drafted(store, [17, 18, 19]) == [], "nothing followed"


def test_different_salts_never_see_each_others_answers() -> None:
    store = AnswerStore(1 << 20)
    salts = (b"", b"one", b"two")
    for index, salt in enumerate(salts):
        for _ in range(5):  # the same texts for all but their last tokens, which name the salt
            answered(store, [*range(10), 1000 + index, 2000 + index], salt)
    for index, salt in enumerate(salts):
        assert drafted(store, list(range(10)), salt=salt) == [1000 + index, 2000 + index]
    assert drafted(store, list(range(10)), salt=b"three") == []


def test_the_prompt_is_drafted_from_and_not_kept() -> None:
    store, prompt = AnswerStore(1 << 20), list(range(30))
    drafter = SuffixDrafter(store, b"", len(prompt))
    assert drafter.propose([*prompt, 4, 5, 6], 3) == [7, 8, 9]
    assert drafted(store, [10, 11, 12]) == []
    assert store.num_tokens == 3 + 3


def test_most_answers_decide_and_where_they_part_it_ends() -> None:
    store = AnswerStore(1 << 20)
    for following in ([4, 5, 6], [4, 5, 7], [9, 9, 9], [4, 5, 8]):
        answered(store, [1, 2, 3, *following])
    assert drafted(store, [1, 2, 3]) == [4, 5]


def test_a_longer_match_elsewhere_wins_over_one_here() -> None:
    store = AnswerStore(1 << 20)
    answered(store, [5, 1, 2, 3, 40, 41])
    assert drafted(store, [6, 1, 2, 3, 50, 5, 1, 2, 3]) == [40, 41]
    assert drafted(store, [5, 1, 2, 3, 50, 5, 1, 2, 3], 1) == [50]


def test_an_answer_that_repeats_itself_still_finds_others() -> None:
    store = AnswerStore(1 << 20)
    answered(store, [7, 8, 9, 1, 2, 3, 40, 41, 42])
    own = [each for index in range(20) for each in (1, 2, 3, 100 + index)]
    drafter = SuffixDrafter(store, b"", len(PROMPT))
    for length in range(1, len(own) + 1):
        drafter.propose([*PROMPT, *own[:length]], 1)
    assert drafter.propose([*PROMPT, *own, 7, 8, 9, 1, 2, 3], 3) == [40, 41, 42]


def test_a_long_answer_from_elsewhere_is_added_piece_by_piece() -> None:
    tokens = list(range(3 * INDEXED_A_CALL))
    store = AnswerStore(len(tokens) * TOKEN_BYTES)
    drafter = SuffixDrafter(store, b"", 0)
    stored = []
    for _ in range(4):
        drafter.propose(tokens, 1)
        stored.append(store.num_tokens)
    assert stored == [INDEXED_A_CALL, 2 * INDEXED_A_CALL, 3 * INDEXED_A_CALL, 3 * INDEXED_A_CALL]


def test_the_oldest_answers_are_forgotten_first() -> None:
    store = AnswerStore(30 * TOKEN_BYTES)
    for first in (100, 200, 300):
        answered(store, list(range(first, first + 10)), bytes([first // 100]))
    assert store.num_tokens == 30 and store.salts == {b"\1", b"\2", b"\3"}
    answered(store, [400], b"\4")
    assert store.num_tokens == 21 and store.salts == {b"\2", b"\3", b"\4"}
    assert drafted(store, [100, 101, 102], salt=b"\1") == []
    assert drafted(store, [300, 301, 302], salt=b"\3") == [303, 304, 305]


def test_an_answer_beyond_the_bound_is_forgotten_while_it_grows() -> None:
    store = AnswerStore(10 * TOKEN_BYTES)
    answered(store, list(range(50)))
    assert store.num_tokens == 0 and store.salts == set()


@pytest.mark.parametrize("seed", range(5))
def test_answers_that_grow_side_by_side_under_eviction_draft_what_is_kept(seed: int) -> None:
    rng, store = random.Random(seed), AnswerStore(60 * TOKEN_BYTES)
    running = {index: (SuffixDrafter(store, bytes([index % 2]), 0), [index % 2 * 10]) for index in range(4)}
    num_drafted = 0
    for _ in range(400):
        index = rng.choice(list(running))
        drafter, tokens = running[index]
        tokens.append(index % 2 * 10 + rng.randrange(3))
        drafts = drafter.propose(tokens, 4)
        assert all(token // 10 == index % 2 for token in drafts)
        assert store.num_tokens <= 60
        num_drafted += len(drafts)
        if rng.random() < 0.05:
            running[index] = (SuffixDrafter(store, bytes([index % 2]), 0), [index % 2 * 10])
    assert num_drafted > 100


def test_what_is_kept_takes_no_more_memory_than_it_is_taken_for() -> None:
    rng, num_tokens = random.Random(0), 20_000
    tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
    tracemalloc.start()
    try:
        store = AnswerStore(num_tokens * TOKEN_BYTES)
        for start in range(0, num_tokens, 500):
            store.extend(b"", Answer(), tokens[start : start + 500])
        kept, _ = tracemalloc.get_traced_memory()
        ngram = NgramDrafter()
        for _ in range(num_tokens // 2000):
            ngram.propose(tokens, 1)
        both, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.num_tokens == num_tokens
    assert kept <= num_tokens * TOKEN_BYTES
    assert both - kept <= num_tokens * 200, "docs/speculation.md names it"
