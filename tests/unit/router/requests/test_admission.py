import pytest

from router.errors import ApiError
from router.requests.admission import Admission


def test_first_come_first_served_and_the_rest_refused():
    admission = Admission(max_concurrent=1, max_queue=2)
    (first,) = admission.acquire(1)
    second, third = admission.acquire(2)
    assert [permit.granted.is_set() for permit in (first, second, third)] == [True, False, False]
    with pytest.raises(ApiError, match="max_queue is 2") as refused:
        admission.acquire(1)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    first.release()
    assert [permit.granted.is_set() for permit in (second, third)] == [True, False]
    third.release()
    assert admission.waiting == 0


def test_all_or_none():
    admission = Admission(max_concurrent=1, max_queue=1)
    with pytest.raises(ApiError):
        admission.acquire(3)
    assert admission.waiting == 0
    assert len(admission.acquire(2)) == 2


def test_a_place_is_given_back_once():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.acquire(3)
    first.release()
    first.release()
    assert second.granted.is_set()
    assert not third.granted.is_set()


def test_a_released_wait_leaves_the_queue():
    admission = Admission(max_concurrent=1, max_queue=5)
    first, second, third = admission.acquire(3)
    second.release()
    assert admission.waiting == 1
    first.release()
    assert third.granted.is_set()
