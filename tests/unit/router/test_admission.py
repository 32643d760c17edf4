import asyncio

import pytest

from router.errors import ApiError
from router.requests.admission import Admission


def test_first_come_first_served_and_the_rest_refused():
    admission = Admission(max_concurrent=1, max_queue=2)
    (first,) = admission.line_up(1)
    second, third = admission.line_up(2)
    assert [t.turn.is_set() for t in (first, second, third)] == [True, False, False]
    with pytest.raises(ApiError, match="max_queue is 2") as refused:
        admission.line_up(1)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    first.drop()
    assert [t.turn.is_set() for t in (second, third)] == [True, False]
    third.drop()
    assert admission.waiting == 0


def test_all_or_none():
    admission = Admission(max_concurrent=1, max_queue=1)
    with pytest.raises(ApiError):
        admission.line_up(3)
    assert admission.waiting == 0
    assert len(admission.line_up(2)) == 2


def test_a_place_is_given_back_once():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.line_up(3)
    first.drop()
    first.drop()
    assert second.turn.is_set()
    assert not third.turn.is_set()


async def test_who_stops_waiting_leaves_the_line():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.line_up(3)

    async def wait() -> None:
        async with second:
            raise AssertionError("it is not its turn")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert admission.waiting == 1
    first.drop()
    assert third.turn.is_set()
