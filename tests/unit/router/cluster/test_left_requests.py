"""Requests that a router has left on nodes: which of a node's orphans it says to give up."""

from router.cluster.left_requests import MOST_OF_A_NODE, LeftRequests

D0, D0_AGAIN, D1 = ("d0", 7), ("d0", 8), ("d1", 7)


def test_only_orphans_that_were_left_on_this_node_are_given_up() -> None:
    left = LeftRequests()
    left.add(D0, "a")
    left.add(D1, "b")
    assert left.among(D0, ["a", "b", "of another router"]) == ("a",)
    assert left.among(D1, []) == ()


def test_a_node_that_has_not_noticed_yet_is_told_later_and_again_until_it_names_it_no_longer() -> None:
    left = LeftRequests()
    left.add(D0, "a")
    assert left.among(D0, []) == (), "its calls have not broken yet"
    assert left.among(D0, ["a"]) == ("a",)
    assert left.among(D0, ["a"]) == ("a",), "the first answer was lost"
    assert left.among(D0, []) == ()
    assert left.among(D0, ["a"]) == (), "another router's, under the same id"


def test_what_a_process_had_ends_with_it() -> None:
    left = LeftRequests()
    left.add(D0, "a")
    assert left.among(D0_AGAIN, ["a"]) == ()
    assert left.among(D0, ["a"]) == ()


def test_the_oldest_are_forgotten() -> None:
    left = LeftRequests()
    for number in range(MOST_OF_A_NODE + 1):
        left.add(D0, str(number))
    assert left.among(D0, ["0", "1"]) == ("1",)
