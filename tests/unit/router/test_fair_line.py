from router.fair_line import FairLine


def anyone(item: str) -> bool:
    return True


def order(line: FairLine[str]) -> list[str]:
    return [item for _ in range(len(line)) if (item := line.take(anyone)) is not None]


def test_one_client_is_served_in_order_of_arrival():
    line: FairLine[str] = FairLine()
    for item in "abcd":
        line.join("one", item, cost=5)
    assert order(line) == ["a", "b", "c", "d"]


def test_clients_take_turns_whoever_sends_most():
    line: FairLine[str] = FairLine()
    for number in range(4):
        line.join("many", f"m{number}", cost=1)
    line.join("few", "f0", cost=1)
    assert order(line) == ["m0", "f0", "m1", "m2", "m3"]


def test_turns_count_the_work_asked_for_and_not_the_requests():
    line: FairLine[str] = FairLine()
    for number in range(2):
        line.join("long", f"l{number}", cost=4)
    for number in range(6):
        line.join("short", f"s{number}", cost=1)
    assert order(line) == ["l0", "s0", "s1", "s2", "s3", "l1", "s4", "s5"]


def test_a_client_that_was_away_has_saved_nothing_up():
    line: FairLine[str] = FairLine()
    for number in range(3):
        line.join("steady", f"a{number}", cost=1)
        assert line.take(anyone) == f"a{number}"
    for number in range(3):
        line.join("late", f"l{number}", cost=1)
    line.join("steady", "a3", cost=1)
    assert order(line) == ["l0", "a3", "l1", "l2"]


def test_an_item_that_may_not_go_is_passed():
    line: FairLine[str] = FairLine()
    line.join("one", "a", cost=1)
    line.join("two", "b", cost=1)
    assert line.take(lambda item: item != "a") == "b"
    assert line.take(lambda item: item != "a") is None
    assert len(line) == 1


def test_the_last_items_are_those_of_the_client_that_asks_for_the_most():
    line: FairLine[str] = FairLine()
    for number in range(3):
        line.join("many", f"m{number}", cost=1)
    assert (line.position("many"), line.position("few")) == (3, 1)
    line.join("few", "f0", cost=1)
    assert line.last(2) == ["m2", "m1"]


def test_nothing_is_remembered_of_clients_once_nobody_waits():
    line: FairLine[str] = FairLine()
    for number in range(3):
        line.join("many", f"m{number}", cost=1)
    line.leave("m2")
    assert order(line) == ["m0", "m1"]
    line.join("few", "f0", cost=1)
    line.join("few", "f1", cost=1)
    line.join("many", "m3", cost=1)
    assert order(line) == ["f0", "m3", "f1"]


def test_a_client_that_is_turned_away_has_asked_for_nothing():
    line: FairLine[str] = FairLine()
    line.join("steady", "s0", cost=1)
    line.join("steady", "s1", cost=1)
    for attempt in range(3):
        line.join("refused", f"r{attempt}", cost=5)
        line.leave(f"r{attempt}")
    line.join("refused", "r3", cost=5)
    assert order(line) == ["s0", "r3", "s1"]


def test_clients_that_got_what_they_asked_for_are_forgotten_while_others_wait():
    line: FairLine[str] = FairLine()
    for number in range(100):
        line.join(f"client {number}", f"i{number}", cost=1)
        line.join("steady", f"s{number}", cost=1)
        for _ in range(2 * (number > 0)):
            line.take(anyone)
    assert len(line) == 2
    assert len(line._clients) <= 4


def test_a_lower_priority_number_goes_first_whatever_the_client_has_had():
    line: FairLine[str] = FairLine()
    line.join("batch", "b0", cost=1, priority=1)
    line.join("many", "m0", cost=1)
    line.join("many", "m1", cost=9)
    line.join("many", "urgent", cost=1, priority=-1)
    line.join("few", "f0", cost=1)
    assert (line.position("batch", 1), line.position("few"), line.position("few", -1)) == (5, 3, 1)
    assert order(line) == ["urgent", "f0", "m0", "m1", "b0"]


def test_work_that_cost_less_than_it_said_gives_its_client_the_rest():
    line: FairLine[str] = FairLine()
    line.join("cached", "c0", cost=10)
    line.join("cached", "c1", cost=10)
    for number in range(5):
        line.join("plain", f"p{number}", cost=2)
    assert line.take(anyone) == "c0"
    line.correct("cached", -9)
    assert order(line) == ["p0", "c1", "p1", "p2", "p3", "p4"]


def test_work_that_cost_more_than_it_said_is_made_up_for():
    line: FairLine[str] = FairLine()
    line.join("long", "l0", cost=1)
    for number in range(3):
        line.join("short", f"s{number}", cost=1)
    assert line.take(anyone) == "l0"
    line.correct("long", 1.5)
    line.join("long", "l1", cost=1)
    assert order(line) == ["s0", "s1", "s2", "l1"]
