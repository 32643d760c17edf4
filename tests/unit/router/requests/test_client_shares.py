import pytest

from router.requests.client_shares import FORGOTTEN, HALF_LIFE_S, RENEWED_S, ClientShares


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def exceeding(shares: ClientShares, *clients: str) -> list[bool]:
    return [shares.is_exceeded(client) for client in clients]


def test_a_client_exceeds_its_share_with_more_than_twice_the_mean(clock):
    shares = ClientShares(clock)
    for client in ("a", "b", "c"):
        shares.add(client, 100)
    shares.add("d", 300)
    assert exceeding(shares, "a", "d", "new") == [False, False, False]  # the mean is 150
    shares.add("d", 1)
    assert exceeding(shares, "a", "d", "new") == [False, True, False]


def test_a_client_alone_has_its_share(clock):
    shares = ClientShares(clock)
    assert not shares.is_exceeded("a")
    shares.add("a", 10**6)
    assert not shares.is_exceeded("a")


def test_old_work_counts_less_and_less(clock):
    shares = ClientShares(clock)
    shares.add("crowd", 4000)
    clock.now_s = 3 * HALF_LIFE_S
    shares.add("a", 250)
    shares.add("b", 250)
    assert not shares.is_exceeded("crowd")  # 500 of 1000
    shares.add("crowd", 600)
    assert shares.is_exceeded("crowd")  # 1100 of 1600


def test_work_that_was_counted_too_much_is_taken_back(clock):
    shares = ClientShares(clock)
    for client in ("a", "b", "c"):
        shares.add(client, 100)
    shares.add("c", 900)
    assert shares.is_exceeded("c")
    shares.add("c", -950)
    assert exceeding(shares, "a", "b", "c") == [False] * 3
    shares.add("c", -100)  # of long ago, and forgotten in part
    assert not shares.is_exceeded("a")


def test_clients_that_have_not_come_for_long_are_forgotten(clock):
    shares = ClientShares(clock)
    shares.add("gone", 100 * FORGOTTEN)
    shares.add("heavy", 1e9)
    clock.now_s = RENEWED_S + 1
    shares.add("new", 10)
    assert len(shares) == 2
    assert exceeding(shares, "gone", "heavy", "new") == [False] * 3  # heavy has all: the mean is half of it
    shares.add("third", 10)
    assert shares.is_exceeded("heavy")
    clock.now_s = 1e9
    shares.add("new", 10)
    assert len(shares) == 1
