"""Drafts from a sequence's own text: compared with a search through all of it, and their cost."""

import random

import pytest

from headrace.speculation.ngram import INDEXED_A_CALL, TRIED_OCCURRENCES, NgramDrafter


def searched(tokens: list[int], min_match: int, max_match: int, max_drafts: int) -> list[int]:
    """The same by trying each match length, longest first, and each occurrence, latest first."""
    for length in range(max_match, min_match - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                drafts = tokens[end:]
                return (drafts * max_drafts)[:max_drafts]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_drafts_follow_the_latest_of_the_longest_occurrences(seed: int) -> None:
    rng = random.Random(seed)
    drafter, tokens, num_drafted = NgramDrafter(2, 5), [], 0
    for _ in range(60):
        tokens += [rng.randrange(5) for _ in range(rng.randint(1, 3))]  # a step's accepted tokens
        drafts = drafter.propose(tokens, 4)
        assert drafts == searched(tokens, 2, 5, 4)
        num_drafted += len(drafts)
    assert num_drafted > 100


def test_what_never_occurred_is_not_drafted_for() -> None:
    assert NgramDrafter().propose(list(range(100)), 4) == []
    assert NgramDrafter().propose([], 4) == []
    assert NgramDrafter(3).propose([1, 2, 9, 1, 2], 4) == []  # two tokens agree, three must


def test_a_repeated_token_goes_on_as_far_as_it_may() -> None:
    assert NgramDrafter().propose([7] * 5, 6) == [7] * 6
    assert NgramDrafter().propose([1, 2, 3] * 3, 5) == [1, 2, 3, 1, 2]


def test_a_longer_match_wins_over_a_later_one() -> None:
    long, short = [5, 1, 2, 3], [6, 1, 2, 3]
    assert NgramDrafter(3).propose([*long, 40, *short, 50, *long], 1) == [40]
    assert NgramDrafter(3, 3).propose([*long, 40, *short, 50, *long], 1) == [50]


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    phrase = [1, 2, 3, 4]
    tokens = [*phrase, *range(10, 10 + 2 * INDEXED_A_CALL), *phrase[:3]]
    drafter = NgramDrafter()
    assert [drafter.propose(tokens, 1) for _ in range(4)] == [[], [], [4], [4]]


class CountedReads(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_call_costs_the_same_however_long_the_text_is() -> None:
    reads = []
    for length in (500, 2000):
        tokens, drafter = CountedReads([1, 2, 3, 4, 5] * (length // 5)), NgramDrafter(3, 16)
        drafter.propose(tokens, 4)
        tokens.append(1)
        tokens.num_read = 0
        drafter.propose(tokens, 4)
        reads.append(tokens.num_read)
    assert reads[0] == reads[1] <= 3 + 2 * 16 * TRIED_OCCURRENCES + 4
