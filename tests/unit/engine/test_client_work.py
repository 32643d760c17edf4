import pytest

from headrace.engine.client_work import ALWAYS_KEPT, HALF_LIFE_S, ClientWork


def test_a_client_that_was_not_seen_has_no_work() -> None:
    assert ClientWork().of(7, now_s=100.0) == 0


def test_work_counts_half_after_a_half_life() -> None:
    work = ClientWork()
    work.add(7, 100, now_s=5.0)
    work.add(7, 60, now_s=5.0 + HALF_LIFE_S)
    assert work.of(7, now_s=5.0 + HALF_LIFE_S) == pytest.approx(110)
    assert work.of(7, now_s=5.0 + 2 * HALF_LIFE_S) == pytest.approx(55)
    assert work.of(8, now_s=5.0) == 0


def test_clients_that_come_once_are_forgotten() -> None:
    work = ClientWork()
    for number in range(20 * ALWAYS_KEPT):
        work.add(number, 100, now_s=float(number))
    assert len(work) <= 2 * ALWAYS_KEPT
    assert work.of(20 * ALWAYS_KEPT - 1, now_s=20.0 * ALWAYS_KEPT) > 90
