from collections.abc import Mapping

from headrace.cache.hashing import PrefixHasher
from headrace.engine.scheduling.waiting import MOST_PASSES, WaitingLine
from headrace.engine.sequence import Job, Sequence
from tests.support.engine.driving import request, resume_locally

NOTHING: Mapping[int, int] = {}


def sequence(
    arrival: float,
    admit_by_s: float = 100.0,
    client: int = 0,
    yield_by_s: float | None = None,
    length: int = 1,
) -> Sequence:
    job = Job(request([7] * length, client=client), resume_locally, 16, admit_by_s, print, yield_by_s=yield_by_s)
    return Sequence(job, PrefixHasher(16), arrival=(arrival, 0))


def drained(line: WaitingLine, held: Mapping[int, int] = NOTHING) -> list[float]:
    order = []
    while (first := line.first(held)) is not None:
        order.append(first.arrival[0])
        line.admitted(first)
    return order


def test_new_ones_come_in_order_and_preempted_ones_before_them_by_arrival() -> None:
    line = WaitingLine()
    for arrival in (5, 6, 7):
        line.join(sequence(arrival))
    for arrival in (3, 1, 2):
        line.put_back(sequence(arrival))
    assert len(line) == 6
    assert drained(line) == [1, 2, 3, 5, 6, 7]
    assert len(line) == 0


def test_a_new_one_that_came_to_the_router_earlier_goes_first() -> None:
    line = WaitingLine()
    for arrival in (5, 6, 1, 7):  # the third was sent on by a node that failed
        line.join(sequence(arrival))
    assert drained(line) == [1, 5, 6, 7]


def test_only_new_ones_have_deadlines() -> None:
    line, late, new = WaitingLine(), sequence(1, admit_by_s=10.0), sequence(2, admit_by_s=20.0)
    line.put_back(sequence(0, admit_by_s=5.0))
    assert line.next_deadline_s() is None
    line.join(late)
    line.join(new)
    assert line.next_deadline_s() == 10.0
    assert line.expire(10.0) == [late]
    assert line.expire(10.0) == []
    assert drained(line) == [0, 2]


def test_one_that_others_may_wait_for_leaves_early_only_behind_those_that_wait_for_others() -> None:
    line, sent, local = WaitingLine(), sequence(1, yield_by_s=10.0), sequence(2)
    line.join(sent)
    line.join(local)
    assert line.next_deadline_s() == 100.0
    assert line.expire(10.0) == []
    assert line.next_deadline_s(others_hold_room=True) == 10.0
    assert line.expire(10.0, others_hold_room=True) == [sent]
    assert drained(line) == [2]


def test_leaving_twice_changes_nothing() -> None:
    line, preempted, new = WaitingLine(), sequence(0), sequence(1)
    line.put_back(preempted)
    line.join(new)
    for _ in range(2):
        line.leave(preempted)
        line.leave(new)
    assert len(line) == 0 and line.first(NOTHING) is None and line.preempted == ()


def test_clients_with_the_fewest_requests_here_go_first() -> None:
    line = WaitingLine()
    for arrival, client in ((1, 7), (2, 8), (3, 9), (4, 8)):
        line.join(sequence(arrival, client=client))
    assert drained(line, {7: 5, 8: 1}) == [3, 2, 4, 1]


def test_preempted_ones_go_first_whatever_their_clients_have() -> None:
    line = WaitingLine()
    line.join(sequence(1, client=9))
    line.put_back(sequence(2, client=7))
    assert drained(line, {7: 5}) == [2, 1]


def test_so_many_in_a_row_pass_one_that_arrived_before_them_and_no_more() -> None:
    line, held = WaitingLine(), {7: 5}
    for arrival in range(2):
        line.join(sequence(arrival, client=7))
    order = []
    for arrival in range(10, 10 + 2 * (MOST_PASSES + 1)):
        line.join(sequence(arrival, client=arrival))
        first = line.first(held)
        assert first is not None
        order.append(first.arrival[0])
        line.admitted(first)
    assert order == [10, 11, 12, 0, 13, 14, 15, 1]


def test_much_shorter_prompts_pass_a_long_one_but_only_so_many() -> None:
    line = WaitingLine()
    for arrival, length in ((0, 100), (1, 60), (2, 49), (3, 10), (4, 30), (5, 10), (6, 200)):
        line.join(sequence(arrival, length=length))
    assert drained(line) == [3, 5, 4, 0, 1, 2, 6], "the shortest first, three before the long one"


def test_lighter_clients_go_before_shorter_prompts() -> None:
    line = WaitingLine()
    for arrival, client, length in ((1, 7, 100), (2, 7, 10), (3, 8, 90)):
        line.join(sequence(arrival, client=client, length=length))
    assert drained(line, {7: 5}) == [3, 2, 1]
