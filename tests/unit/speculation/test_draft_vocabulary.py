"""Which tokens a layer's head has rows for: those that occur, and the lowest ids."""

from array import array
from random import Random

from headrace.speculation.draft_vocabulary import DraftVocabulary


def applied(changes: list[tuple[int, int]], token_of: list[int]) -> list[int]:
    """The rows' tokens behind these changes."""
    for row, token in changes:
        token_of[row] = token
    return token_of


def test_tokens_that_occur_take_the_rows_of_the_highest_ids() -> None:
    vocabulary = DraftVocabulary(vocab_size=1000, num_rows=10)
    vocabulary.add(array("i", [700, 3, 9, 500, 700]))
    rows, tokens = zip(*vocabulary.changes(64), strict=True)
    assert (set(rows), set(tokens)) == ({7, 8}, {500, 700})  # row 9 is in use
    assert vocabulary.changes(64) == []


def test_few_rows_change_at_once_and_the_others_later() -> None:
    vocabulary = DraftVocabulary(vocab_size=1000, num_rows=10)
    vocabulary.add([100, 101, 102])
    assert [len(vocabulary.changes(2)) for _ in range(3)] == [2, 1, 0]


def test_of_more_tokens_than_rows_those_that_occurred_last_have_them() -> None:
    vocabulary = DraftVocabulary(vocab_size=1000, num_rows=4)
    token_of = list(range(4))
    for token in (100, 101, 102, 103):
        vocabulary.add([token])
    assert sorted(applied(vocabulary.changes(64), token_of)) == [100, 101, 102, 103]
    vocabulary.add([100])
    vocabulary.add([200])
    assert sorted(applied(vocabulary.changes(64), token_of)) == [100, 102, 103, 200]
    vocabulary.add([101])
    assert sorted(applied(vocabulary.changes(64), token_of)) == [100, 101, 103, 200]


def test_the_latest_tokens_have_rows_whatever_came_before() -> None:
    dice = Random(0)
    for _ in range(200):
        num_rows = dice.randint(2, 20)
        vocabulary, token_of = DraftVocabulary(vocab_size=60, num_rows=num_rows), list(range(num_rows))
        for _ in range(30):
            latest = dice.sample(range(60), dice.randint(1, num_rows // 2))
            vocabulary.add(latest)
            applied(vocabulary.changes(64), token_of)
            assert len(set(token_of)) == num_rows
            assert set(latest) <= set(token_of)
