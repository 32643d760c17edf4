"""Clients: their rates, priorities and salts."""

import pytest

from router.errors import ApiError
from router.requests.client import Client, TokenRate


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refusal(rate: TokenRate) -> ApiError:
    with pytest.raises(ApiError, match="used its 600 tokens a minute") as refused:
        rate.check("ann")
    return refused.value


def test_a_used_up_rate_says_when_it_is_not_any_more():
    clock = Clock()
    rate = TokenRate(600, clock)
    rate.check("ann")
    rate.charge(900)  # 300 more than it holds
    error = refusal(rate)
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.retry_after_s == 31  # 300 tokens at 10 a second, and one to begin with
    clock.now_s = 30.0
    refusal(rate)
    clock.now_s = 31.0
    rate.check("ann")


def test_a_pause_saves_up_one_minute_at_the_most():
    clock = Clock()
    rate = TokenRate(600, clock)
    clock.now_s = 3600.0
    rate.check("ann")
    rate.charge(600)
    refusal(rate)


def test_what_was_charged_too_much_comes_back():
    rate = TokenRate(600, Clock())
    rate.charge(700)
    refusal(rate)
    rate.charge(-500)
    rate.check("ann")
    rate.charge(-5000)
    rate.charge(600)
    refusal(rate)


def test_another_rate_keeps_what_was_used():
    rate = TokenRate(300, Clock())
    rate.charge(300)
    rate.change(600)
    rate.check("ann")
    rate.charge(300)
    refusal(rate)


def test_requests_have_their_clients_priority_and_may_ask_for_a_later_one_only():
    for priority in (-5, 0, 3):
        client = Client("ann", priority=priority)
        assert [client.priority_of(asked) for asked in (None, priority, priority + 7)] == [
            priority,
            priority,
            priority + 7,
        ]
        with pytest.raises(ApiError, match=f"priority {priority - 1}: this client may ask for {priority} and above"):
            client.priority_of(priority - 1)


def test_no_salt_of_one_tenant_is_one_of_another():
    salts = [client.salt(given) for client in (Client("a", "x"), Client("b", "xx")) for given in (b"", b"x", b"\0x")]
    assert len(set(salts)) == len(salts)
    assert Client("a").salt(b"own") == b"own"
