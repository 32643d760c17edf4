"""Who gets a part of a bounded quantity when others hold all of it."""

import pytest

from router.errors import ApiError
from router.http.shares import Shares


def test_a_client_that_holds_little_is_not_kept_out_by_those_who_hold_everything():
    shares = Shares("body bytes", 1000, "max_bodies_bytes", 600, little=10)
    shares.take("a", 600)
    shares.take("b", 400)
    shares.take("c", 10)
    for client in ("b", "c"):
        with pytest.raises(ApiError, match="max_bodies_bytes is 1000") as refused:
            shares.take(client, 1)
        assert refused.value.status == 503
    shares.give_back("c", 10)
    shares.take("c", 10)


def test_many_who_hold_little_are_bounded_too():
    shares = Shares("body bytes", 1000, "max_bodies_bytes", None, little=10)
    shares.take("a", 1000)
    for number in range(25):
        shares.take(f"little {number}", 10)
    with pytest.raises(ApiError, match="max_bodies_bytes is 1000"):
        shares.take("one more", 1)
    assert shares.total == 1250


def test_nobody_passes_a_limit_of_all_that_has_no_spare_part():
    shares = Shares("connections", 4, "max_connections", None)
    shares.take("a", 4)
    with pytest.raises(ApiError):
        shares.take("b", 1)
