from headrace.cache.hashing import PrefixHasher
from headrace.engine.sequence import Job, Sequence
from headrace.engine.waiting import WaitingLine
from tests.support.engine.driving import request, resume_locally


def sequence(arrival: float, admit_by_s: float = 100.0) -> Sequence:
    job = Job(request([7]), resume_locally, 16, admit_by_s, print)
    return Sequence(job, PrefixHasher(16), [7], arrival=(arrival, 0))


def drained(line: WaitingLine) -> list[float]:
    order = []
    while (first := line.first()) is not None:
        order.append(first.arrival[0])
        line.leave(first)
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


def test_leaving_twice_changes_nothing() -> None:
    line, preempted, new = WaitingLine(), sequence(0), sequence(1)
    line.put_back(preempted)
    line.join(new)
    for _ in range(2):
        line.leave(preempted)
        line.leave(new)
    assert len(line) == 0 and line.first() is None and line.preempted == ()
