from dataclasses import dataclass, field

import pytest

from headrace.cache.leases import Leases


@dataclass
class World:
    now_s: float = 100.0
    given_back: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def leases(world: World) -> Leases:
    return Leases(world.clock)


def test_a_lease_expires_at_its_deadline_and_gives_back_once(world: World, leases: Leases) -> None:
    late = leases.grant(lambda: world.given_back.append("late"), deadline_s=120)
    early = leases.grant(lambda: world.given_back.append("early"), deadline_s=110)
    assert leases.next_deadline_s() == 110
    world.now_s = 109.9
    assert leases.expire() == [] and len(leases) == 2
    world.now_s = 110
    assert leases.expire() == [early]
    assert leases.expire(1000) == [late]
    assert world.given_back == ["early", "late"]
    assert leases.expire(2000) == [] and len(leases) == 0 and leases.next_deadline_s() is None


def test_a_released_lease_does_not_expire(world: World, leases: Leases) -> None:
    lease = leases.grant(lambda: world.given_back.append("it"), deadline_s=110)
    assert leases.release(lease)
    assert world.given_back == ["it"]
    assert not leases.release(lease)
    assert leases.expire(1000) == []
    assert world.given_back == ["it"]


def test_giving_back_may_grant_and_release_others(world: World, leases: Leases) -> None:
    second = leases.grant(lambda: world.given_back.append("second"), deadline_s=110)
    first = leases.grant(lambda: world.given_back.append(str(leases.release(second))), deadline_s=105)
    assert leases.expire(110) == [first]
    assert world.given_back == ["second", "True"]
