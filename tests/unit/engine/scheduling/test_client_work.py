import pytest

from headrace.engine.scheduling.client_work import HALF_LIFE_S, ClientWork


def work_of(costs: dict[int, float]) -> ClientWork:
    work = ClientWork()
    work.pass_time(1000.0)
    for client, cost in costs.items():
        work.add(client, cost)
    return work


def test_a_client_that_was_not_seen_has_no_work() -> None:
    work = ClientWork()
    work.pass_time(100.0)
    assert work.of(7) == 0 and not work.is_over_share(7)


def test_work_counts_half_after_a_half_life() -> None:
    work = ClientWork()
    work.pass_time(5.0)
    work.add(7, 100)
    work.pass_time(5.0 + HALF_LIFE_S / 2)
    work.add(7, 0)
    work.pass_time(5.0 + HALF_LIFE_S)
    work.add(7, 60)
    assert work.of(7) == pytest.approx(110)
    work.pass_time(5.0 + 2 * HALF_LIFE_S)
    assert work.of(7) == pytest.approx(55)
    assert work.of(8) == 0


def test_clients_that_come_once_are_forgotten() -> None:
    work = ClientWork()
    for number in range(500):
        work.pass_time(float(number))
        work.add(number, 100)
    assert len(work) <= 8 * HALF_LIFE_S
    assert work.of(499) == 100


def test_who_has_had_more_than_twice_the_mean_of_the_others_exceeds() -> None:
    work = work_of({1: 500, 2: 90, 3: 110, 4: 100})
    assert [work.is_over_share(client) for client in (1, 2, 3, 4, 5)] == [True, False, False, False, False]


def test_of_two_clients_one_may_exceed() -> None:
    work = work_of({1: 201, 2: 100})
    assert work.is_over_share(1) and not work.is_over_share(2)


def test_of_many_clients_alike_none_exceeds() -> None:
    work = work_of(dict.fromkeys(range(64), 5000.0))
    assert not any(work.is_over_share(client) for client in range(64))


def test_a_lone_client_never_exceeds_until_another_is_present() -> None:
    work = work_of({1: 1e6})
    assert not work.is_over_share(1)
    work.pass_time(1000.0, present=[1, 2])
    assert work.is_over_share(1) and not work.is_over_share(2)


def test_clients_that_are_gone_are_no_measure_for_the_others() -> None:
    work = work_of({1: 1000, 2: 10})
    assert work.is_over_share(1)
    work.pass_time(1000.0 + 5 * HALF_LIFE_S)
    work.add(1, 1000)
    assert len(work) == 1 and not work.is_over_share(1)


def test_a_client_without_work_never_exceeds() -> None:
    work = ClientWork()
    work.pass_time(1.0, present=[1, 2, 3])
    assert not any(work.is_over_share(client) for client in (1, 2, 3))
