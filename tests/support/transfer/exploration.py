"""Every state that a small world can get into, breadth first: each reached by every order of what may happen."""

import gc
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self


class World(Protocol):
    """A value. `after` leaves it as it is and returns another; it raises what must never happen."""

    def key(self) -> Hashable: ...
    def enabled(self) -> Iterable[tuple]: ...
    def after(self, action: tuple) -> Self: ...


@dataclass(frozen=True)
class Explored:
    """num_states   all that can be reached; num_steps: all ways from one to another; ends: where nothing can happen"""

    num_states: int
    num_steps: int
    ends: list


class Violation(AssertionError):
    """What must never happen, and the shortest way there."""


@contextmanager
def no_collection() -> Iterator[None]:
    """States are kept to the end: walking millions of objects again and again would find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@no_collection()
def explore(start: World, limit: int = 2_000_000) -> Explored:
    """Raises `Violation`; also when some run never ends, or when there are more states than `limit`."""
    numbers = {start.key(): 0}
    came_from: list[tuple[int, tuple]] = [(0, ())]
    successors: list[list[int]] = []
    ends = []
    frontier = deque([start])
    while frontier:
        world = frontier.popleft()
        here = len(successors)  # first in, first out: they come back in the order of their numbers
        reached = []
        for action in world.enabled():
            try:
                after = world.after(action)
            except Exception as error:
                raise Violation(f"{error!r} after {path_to(here, came_from)} then {action}") from error
            number = numbers.setdefault(after.key(), len(numbers))
            if number == len(came_from):
                came_from.append((here, action))
                frontier.append(after)
            reached.append(number)
        if not reached:
            ends.append((world, path_to(here, came_from)))
        successors.append(reached)
        if len(numbers) > limit:
            raise Violation(f"more than {limit} states")
    require_acyclic(successors)
    return Explored(len(numbers), sum(map(len, successors)), ends)


def path_to(number: int, came_from: list[tuple[int, tuple]]) -> list[tuple]:
    """The actions of the shortest run to a state."""
    actions = []
    while number:
        number, action = came_from[number]
        actions.append(action)
    return actions[::-1]


def require_acyclic(successors: list[list[int]]) -> None:
    """Without a cycle every run ends: nothing is for ever under way. Kahn's algorithm."""
    num_ways_in = [0] * len(successors)
    for reached in successors:
        for number in reached:
            num_ways_in[number] += 1
    ready = [number for number, count in enumerate(num_ways_in) if count == 0]
    num_removed = 0
    while ready:
        num_removed += 1
        for number in successors[ready.pop()]:
            num_ways_in[number] -= 1
            if num_ways_in[number] == 0:
                ready.append(number)
    if num_removed < len(successors):
        raise Violation("some run never ends: there is a cycle of states")
