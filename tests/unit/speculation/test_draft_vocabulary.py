"""Which tokens a layer's head has rows for: those that occur, and the lowest ids."""

from random import Random

import numpy as np

from headrace.speculation.draft_vocabulary import DraftVocabulary


def add(vocabulary: DraftVocabulary, *tokens: int) -> None:
    vocabulary.add(np.array(tokens, dtype=np.int32))


def change(vocabulary: DraftVocabulary, token_of: list[int], most: int = 64) -> int:
    """Makes the changes in `token_of`, too; returns their number."""
    rows, tokens = vocabulary.changes(most)
    vocabulary.made(rows, tokens)
    for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
        token_of[row] = token
    assert len(set(token_of)) == len(token_of)
    return len(rows)


def test_tokens_that_occur_take_the_rows_of_the_highest_ids() -> None:
    vocabulary, token_of = DraftVocabulary(vocab_size=1000, num_rows=10), list(range(10))
    add(vocabulary, 700, 3, 9, 500, 700)
    assert change(vocabulary, token_of) == 2
    assert token_of[:7] == [*range(7)] and token_of[9] == 9  # which is in use
    assert {700, 500} == set(token_of[7:9])
    assert change(vocabulary, token_of) == 0


def test_what_was_not_made_is_still_to_change() -> None:
    vocabulary = DraftVocabulary(vocab_size=1000, num_rows=10)
    add(vocabulary, 700)
    assert [each.tolist() for each in vocabulary.changes(64)] == [[9], [700]]
    assert [each.tolist() for each in vocabulary.changes(64)] == [[9], [700]]


def test_the_latest_tokens_come_first_where_few_rows_change_at_once() -> None:
    vocabulary, token_of = DraftVocabulary(vocab_size=1000, num_rows=100), list(range(100))
    add(vocabulary, *range(200, 250))
    add(vocabulary, 300, 301)
    assert change(vocabulary, token_of, most=2) == 2
    assert {300, 301} <= set(token_of)
    assert [change(vocabulary, token_of, most=30) for _ in range(3)] == [30, 20, 0]


def test_of_more_tokens_than_rows_those_that_occurred_last_have_them() -> None:
    vocabulary, token_of = DraftVocabulary(vocab_size=1000, num_rows=4), list(range(4))
    for token in (100, 101, 102, 103):
        add(vocabulary, token)
    change(vocabulary, token_of)
    add(vocabulary, 100)
    add(vocabulary, 200)
    change(vocabulary, token_of)
    assert set(token_of) == {100, 102, 103, 200}
    add(vocabulary, 101)
    change(vocabulary, token_of)
    assert set(token_of) == {100, 101, 103, 200}


def test_no_token_takes_the_row_of_one_that_occurred_later_or_with_it() -> None:
    vocabulary, token_of = DraftVocabulary(vocab_size=1000, num_rows=4), list(range(4))
    add(vocabulary, *range(100, 110))
    assert change(vocabulary, token_of) == 4
    assert change(vocabulary, token_of) == 0
    add(vocabulary, 500)
    assert change(vocabulary, token_of) == 1 and 500 in token_of
    assert change(vocabulary, token_of) == 0


def test_whatever_came_before_the_latest_tokens_have_rows() -> None:
    dice = Random(0)
    for _ in range(200):
        num_rows = dice.randint(2, 20)
        vocabulary, token_of = DraftVocabulary(vocab_size=60, num_rows=num_rows), list(range(num_rows))
        for _ in range(30):
            add(vocabulary, *dice.sample(range(60), dice.randint(1, 40)))  # more than are changed, and than rows
            latest = dice.sample(range(60), dice.randint(1, num_rows // 2))
            add(vocabulary, *latest)
            change(vocabulary, token_of, most=len(latest))
            assert set(latest) <= set(token_of)
