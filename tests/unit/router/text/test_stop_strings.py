from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = [watcher.push(piece) for piece in pieces]
    return [*shown, watcher.finish()], watcher.found


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["END"], ["ab", "cEND", "x"], ["ab", "c", "", ""], "END"),
        (["END"], ["a", "E", "N", "D"], ["a", "", "", "", ""], "END"),
        (["END"], ["aE", "N", "x"], ["a", "", "ENx", ""], None),
        (["END"], ["aEN"], ["a", "EN"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (["long stop", "s"], ["a long stop"], ["a long ", ""], "s"),  # "s" is complete first
        (["bc", "abc"], ["xabcd"], ["x", ""], "abc"),  # both end together: the longer one
    ],
)
def test_a_stop_string_is_held_back_while_possible_and_cut_out_when_found(stops, pieces, shown, found):
    assert feed(stops, pieces) == (shown, found)


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_outcome_does_not_depend_on_the_pieces(text, stops, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    shown, found = feed(stops, pieces)
    by_character, found_by_character = feed(stops, list(text))
    assert "".join(shown) == "".join(by_character)
    assert found == found_by_character
    assert (found is not None) == any(stop in text for stop in stops)
    assert text.startswith("".join(shown))
    assert not any(stop in "".join(shown) for stop in stops)


def test_a_long_beginning_that_fails_costs_no_more_than_its_characters():
    compared = 0

    class Counted(str):
        def __getitem__(self, place):
            nonlocal compared
            compared += 1
            return super().__getitem__(place)

    stop, text = Counted("a" * 1023 + "b"), "a" * 20_000 + "c"
    watcher = StopStrings([stop])
    compared = 0
    assert "".join(watcher.push(character) for character in text) == text
    assert compared < 4 * len(text)
