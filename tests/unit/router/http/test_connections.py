"""Connections beyond the limit: which idle one gives way, and who is refused."""

from dataclasses import dataclass

import pytest

from router.errors import ApiError
from router.http.connections import Connections
from router.http.limits import HttpLimits


@dataclass(eq=False)
class Fake:
    is_idle: bool = True
    has_given_way: bool = False

    def give_way(self) -> None:
        self.has_given_way = True


def opened(connections: Connections, client: str, count: int, *, is_idle: bool = True) -> list[Fake]:
    made = [Fake(is_idle) for _ in range(count)]
    for each in made:
        connections.opened(each, client)
    return made


def of(max_connections: int) -> Connections:
    return Connections(HttpLimits(max_connections=max_connections, max_connections_per_client=None))


def test_the_oldest_idle_one_of_the_client_with_the_most_gives_way():
    connections = of(6)
    busy = opened(connections, "crowd", 1, is_idle=False)
    idle = opened(connections, "crowd", 3)
    few = opened(connections, "few", 2)
    opened(connections, "new", 1)
    assert [each.has_given_way for each in (*busy, *idle, *few)] == [False, True, False, False, False, False]
    connections.closed(idle[0], "crowd")  # as its transport reports later: it is not counted twice
    with pytest.raises(ApiError, match="max_connections is 6"):
        for _ in range(3):
            opened(connections, "new", 1)


def test_busy_connections_do_not_give_way():
    connections = of(3)
    opened(connections, "crowd", 3, is_idle=False)
    with pytest.raises(ApiError) as refused:
        opened(connections, "new", 1)
    assert refused.value.status == 503


@pytest.mark.parametrize("client", ["crowd", "as many"])
def test_nobody_takes_a_place_to_have_as_many_as_the_one_that_gave_it(client: str):
    connections = of(5)
    crowd = opened(connections, "crowd", 3)
    opened(connections, "as many", 2)
    with pytest.raises(ApiError):
        opened(connections, client, 1)
    assert not any(each.has_given_way for each in crowd)


def test_a_closed_connection_leaves_room():
    connections = of(1)
    for _ in range(3):
        (only,) = opened(connections, "a", 1)
        connections.closed(only, "a")
        connections.closed(only, "a")
    opened(connections, "b", 1)
