"""Responses kept for later: bounds, owners, time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.responses_api.limits import StoredLimits
from router.api.responses_api.stored_responses import ENTRY_BYTES, StoredResponse, StoredResponses


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response(size: int = 0) -> StoredResponse:
    return StoredResponse(b"x" * size, ())


def store(clock: Clock | None = None, **limits: int | float) -> StoredResponses:
    return StoredResponses(StoredLimits(**limits), clock or Clock())  # type: ignore[arg-type]


def test_another_tenants_response_is_not_found_and_not_deleted():
    kept = store()
    kept.put("a", "resp_1", response(1))
    assert kept.get("b", "resp_1") is None
    assert not kept.delete("b", "resp_1")
    kept.put("b", "resp_1", response(2))
    assert kept.get("a", "resp_1") == response(1)
    assert kept.delete("a", "resp_1") and not kept.delete("a", "resp_1")
    assert kept.get("b", "resp_1") == response(2)


def test_the_least_recently_used_of_a_tenant_make_room_for_its_next():
    kept = store(max_stored_responses_per_client=2)
    kept.put("other", "o", response())
    for name in ("1", "2"):
        kept.put("a", name, response())
    assert kept.get("a", "1") is not None  # used: now "2" is the oldest
    kept.put("a", "3", response())
    assert [name for name in "123" if kept.get("a", name)] == ["1", "3"]
    assert kept.get("other", "o") is not None


def test_bytes_are_bounded_for_a_tenant_and_in_all():
    part = ENTRY_BYTES + 100
    kept = store(max_stored_bytes_per_client=2 * part, max_stored_bytes=3 * part)
    for tenant in ("a", "b"):
        for name in ("1", "2", "3"):
            kept.put(tenant, name, response(100))
    assert [(tenant, name) for tenant in "ab" for name in "123" if kept.get(tenant, name)] == [
        ("a", "3"),
        ("b", "2"),
        ("b", "3"),
    ]
    kept.put("c", "1", response(2 * part))  # larger than a tenant's part
    assert kept.get("c", "1") is None and len(kept) == 3


def test_a_response_goes_after_its_time_without_use():
    clock = Clock()
    kept = store(clock, stored_response_s=10)
    kept.put("a", "1", response())
    kept.put("a", "2", response())
    clock.now_s = 9
    assert kept.get("a", "1") is not None
    clock.now_s = 11
    assert kept.get("a", "2") is None and kept.get("a", "1") is not None
    clock.now_s = 30
    assert kept.get("a", "1") is None
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_nothing_is_kept_where_none_may_be():
    kept = store(max_stored_responses=0)
    kept.put("a", "1", response())
    assert kept.get("a", "1") is None


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("ab"), st.sampled_from("123"), st.integers(0, 9))))
def test_what_it_counts_is_what_it_keeps(steps: list[tuple[str, str, str, int]]):
    clock = Clock()
    kept = store(clock, max_stored_responses=4, max_stored_responses_per_client=3, stored_response_s=5)
    for kind, tenant, name, size in steps:
        clock.now_s += size / 3
        match kind:
            case "p":
                kept.put(tenant, name, response(size))
            case "g":
                kept.get(tenant, name)
            case "d":
                kept.delete(tenant, name)
        held = [response for response, _ in kept._kept.values()]
        assert kept.num_bytes == sum(each.num_bytes for each in held)
        assert sum(part.num_bytes for part in kept._tenants.values()) == kept.num_bytes
        assert sum(part.count for part in kept._tenants.values()) == len(kept) <= 4
        assert all(0 < part.count <= 3 for part in kept._tenants.values())


@pytest.mark.parametrize("field", ["max_stored_bytes", "stored_response_s"])
def test_a_bad_limit_is_named(field: str):
    with pytest.raises(Exception, match=f"{field} 0: must be"):
        StoredLimits(**{field: 0})  # type: ignore[arg-type]
