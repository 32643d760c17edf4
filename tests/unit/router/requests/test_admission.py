import asyncio

import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from router.errors import ApiError
from router.requests.admission import Admission, AdmissionPermit

ONE = [Request("r", TokenArray.of((1, 2)), 2, Sampling(max_tokens=2, seed=1))]


def granted(*permits: AdmissionPermit) -> list[bool]:
    return [permit.is_granted for permit in permits]


def test_first_come_first_served_and_the_rest_refused():
    admission = Admission(max_concurrent=1, max_queue=2)
    (first,) = admission.acquire("a", ONE)
    second, third = admission.acquire("a", ONE * 2)
    assert granted(first, second, third) == [True, False, False]
    with pytest.raises(ApiError, match="max_queue is 2") as refused:
        admission.acquire("a", ONE)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    first.release()
    assert granted(second, third) == [True, False]
    third.release()
    assert admission.waiting == 0


def test_all_or_none():
    admission = Admission(max_concurrent=1, max_queue=1)
    with pytest.raises(ApiError):
        admission.acquire("a", ONE * 3)
    assert admission.waiting == 0
    assert len(admission.acquire("a", ONE * 2)) == 2


def test_a_place_is_given_back_once():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.acquire("a", ONE * 3)
    first.release()
    first.release()
    assert granted(second, third) == [True, False]


def test_a_released_wait_leaves_the_queue():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.acquire("a", ONE * 3)
    second.release()
    assert admission.waiting == 1
    first.release()
    assert third.is_granted


def test_a_client_that_sends_much_waits_longer_itself():
    admission = Admission(max_concurrent=1, max_queue=9)
    first, *more = admission.acquire("many", ONE * 4)
    (other,) = admission.acquire("few", ONE)
    first.release()
    more[0].release()
    assert granted(other, *more[1:]) == [True, False, False]


def test_a_cached_prompt_costs_its_client_no_turn():
    prompt = Request("r", TokenArray.of((1,) * 1000), 1000, Sampling(max_tokens=2, seed=1))
    admission = Admission(max_concurrent=1, max_queue=9)
    cached = admission.acquire("cached", [prompt] * 3)
    plain = admission.acquire("plain", [prompt] * 3)
    order = []
    while waiting := [permit for permit in (*cached, *plain) if permit.is_granted and permit not in order]:
        order += waiting
        computed = 10 if waiting[0].client == "cached" else 1000
        waiting[0].served(computed_tokens=computed, answer_tokens=2)
        waiting[0].release()
    assert [permit.client for permit in order] == ["cached", "plain", "cached", "cached", "plain", "plain"]


def test_answers_count_by_their_tokens():
    chatty = Request("r", TokenArray.of((1,) * 10), 10, Sampling(max_tokens=4096, seed=1))
    admission = Admission(max_concurrent=1, max_queue=9)
    (long,) = admission.acquire("long", [chatty])
    next_long = admission.acquire("long", [chatty])
    short = admission.acquire("short", [chatty] * 3)
    long.served(computed_tokens=10, answer_tokens=4096)
    long.release()
    for permit in short:
        assert permit.is_granted and not next_long[0].is_granted
        permit.served(computed_tokens=10, answer_tokens=20)
        permit.release()
    assert next_long[0].is_granted


def test_a_lower_priority_number_goes_first():
    admission = Admission(max_concurrent=1, max_queue=9)
    (first,) = admission.acquire("a", ONE)
    (background,) = admission.acquire("b", ONE, priority=7)
    (plain,) = admission.acquire("a", ONE)
    (urgent,) = admission.acquire("ops", ONE, priority=-5)
    order, last = [], first
    for _ in range(3):
        last.release()
        last = next(permit for permit in (background, plain, urgent) if permit.is_granted and permit not in order)
        order.append(last)
    assert order == [urgent, plain, background]


def test_a_request_that_would_wait_beyond_its_objective_is_refused():
    admission = Admission(max_concurrent=1, max_queue=9, nodes_line_s=lambda num_tokens: 4.0)
    admission.acquire("a", ONE)
    with pytest.raises(ApiError, match="no node keeps the objectives first_token_s 2") as refused:
        admission.acquire("a", ONE, first_token_s=2.0)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "objectives_missed", 6)
    assert admission.acquire("a", ONE, first_token_s=9.0)


def test_a_short_prompt_is_not_refused_for_the_long_ones_at_the_nodes():
    lines: list[int] = []

    def nodes_line_s(num_tokens: int) -> float:
        lines.append(num_tokens)
        return num_tokens / 100

    admission = Admission(max_concurrent=1, max_queue=9, timeout_s=10.0, nodes_line_s=nodes_line_s)
    long = [Request("r", TokenArray.of((1,) * 5000), 5000, Sampling(max_tokens=2, seed=1))]
    admission.acquire("a", ONE)
    with pytest.raises(ApiError, match="would take about"):
        admission.acquire("a", long)
    assert admission.acquire("a", ONE)
    assert lines == [5000, 2]


async def test_a_full_queue_drops_the_request_that_would_go_last():
    admission = Admission(max_concurrent=1, max_queue=2)
    first, second, third = admission.acquire("many", ONE * 3)
    admission.check_line("few")
    with pytest.raises(ApiError):
        admission.check_line("many")
    (other,) = admission.acquire("few", ONE)
    with pytest.raises(ApiError, match="max_queue is 2"):
        async with asyncio.timeout(1):
            await third.wait()
    third.release()
    assert admission.waiting == 2
    first.release()
    second.release()
    assert other.is_granted


def test_a_client_keeps_to_its_own_places():
    admission = Admission(max_concurrent=3, max_queue=9, max_per_client=2)
    first, second, third = admission.acquire("many", ONE * 3)
    (other,) = admission.acquire("few", ONE)
    assert granted(first, second, third, other) == [True, True, False, True]
    other.release()
    assert not third.is_granted
    first.release()
    assert third.is_granted


def test_a_clients_first_request_does_not_wait_for_the_further_ones_of_others():
    admission = Admission(max_concurrent=8, max_queue=2)
    many = admission.acquire("many", ONE * 10)
    assert granted(*many) == [True] * 8 + [False] * 2, "a client alone gets max_concurrent"
    firsts = [admission.acquire(name, ONE)[0] for name in ("few", "other")]
    assert granted(*firsts) == [True, True], "also while the queue is full"
    with pytest.raises(ApiError, match="max_queue is 2"):
        admission.acquire("few", ONE * 3)
    many[0].release()
    many[1].release()
    assert granted(many[8]) == [False], "two run beyond max_concurrent as it was"
    many[2].release()
    assert granted(many[8]) == [True]


def test_no_more_than_a_quarter_more_places_go_to_first_requests():
    admission = Admission(max_concurrent=8, max_queue=9)
    many = admission.acquire("many", ONE * 8)
    permits = [admission.acquire(f"client {i}", ONE)[0] for i in range(4)]
    assert granted(*permits) == [True, True, False, False]
    permits[0].release()
    assert granted(*permits[2:]) == [True, False]
    for permit in (*many, *permits):
        permit.release()
    assert granted(*admission.acquire("many", ONE * 9)) == [True] * 8 + [False]


def test_a_first_request_is_let_in_whatever_the_wait_of_others_is():
    now_s = 0.0
    admission = Admission(max_concurrent=4, max_queue=9, timeout_s=10, clock=lambda: now_s)
    admission.acquire("many", ONE * 5)
    now_s = 100.0
    with pytest.raises(ApiError, match="request_timeout_s"):
        admission.check_line("many")
    admission.check_line("few")
    assert admission.acquire("few", ONE)[0].is_granted
    with pytest.raises(ApiError, match="request_timeout_s"):
        admission.check_line("other")


def test_a_client_that_was_refused_keeps_its_turn():
    admission = Admission(max_concurrent=1, max_queue=3)
    first, *rest = admission.acquire("many", ONE * 4)
    for _ in range(5):
        with pytest.raises(ApiError):
            admission.acquire("few", ONE * 4)
    (other,) = admission.acquire("few", ONE)
    rest.pop().release()
    first.release()
    rest[0].release()
    assert granted(other, rest[1]) == [True, False]


def test_more_than_the_nodes_can_answer_within_the_gap_wait_until_they_can():
    room = 2
    admission = Admission(max_concurrent=8, max_queue=9, room_within_gap=lambda: room)
    permits = admission.acquire("a", ONE * 4)
    assert granted(*permits) == [True, True, False, False]
    for permit in permits[:2]:
        permit.placed()
    room = 1
    permits[0].release()
    assert granted(*permits[1:]) == [True, True, False]
    permits[2].placed()  # which takes the room
    room = 1  # a node has reported that it pauses an answer
    admission.grant()
    assert granted(*permits[1:]) == [True, True, True]


def test_one_request_runs_however_short_the_gap():
    admission = Admission(max_concurrent=8, max_queue=9, room_within_gap=lambda: 0)
    first, second = admission.acquire("a", ONE * 2)
    assert granted(first, second) == [True, False]
    first.release()
    assert second.is_granted


def test_a_client_without_a_place_gets_one_beyond_the_gap():
    admission = Admission(max_concurrent=8, max_queue=9, room_within_gap=lambda: 4)
    many = admission.acquire("many", ONE * 6)
    (first,), (second,) = admission.acquire("b", ONE), admission.acquire("c", ONE)
    assert granted(*many, first, second) == [True] * 4 + [False] * 2 + [True, False]
