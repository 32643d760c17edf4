"""Rounds on an event loop whose clock stands still unless a test, or the work of a round, moves it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.wire.rounds import MOST_PAUSE_S, Rounds

TURNS = 10
"""Turns of the loop, more than a round takes."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop with the time that is set."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s


def on_stepped_loop(test: Callable[[SteppedLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SteppedLoop)
        runner.run(test(loop))


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def test_a_loop_that_has_time_passes_on_at_once() -> None:
    async def test(loop: SteppedLoop) -> None:
        rounds, passed_on = Rounds(), []
        for number in range(5):  # though the clock does not move between them
            rounds.add(lambda number=number: passed_on.append(number))
            await turns()
            assert passed_on == list(range(number + 1))

    on_stepped_loop(test)


def test_what_is_added_again_before_its_round_is_called_once_and_all_keep_their_order() -> None:
    async def test(loop: SteppedLoop) -> None:
        rounds, passed_on = Rounds(), []
        first, second = (lambda: passed_on.append(1)), (lambda: passed_on.append(2))
        for deliver in (first, second, first, first, second):
            rounds.add(deliver)
        assert passed_on == [], "a node's next message may be on its way"
        await turns()
        assert passed_on == [1, 2]

    on_stepped_loop(test)


@pytest.mark.parametrize("in_a_task", [False, True])
def test_the_next_round_waits_as_long_as_one_took_with_the_tasks_that_it_woke(in_a_task: bool) -> None:
    async def test(loop: SteppedLoop) -> None:
        rounds, passed_on, woken = Rounds(), [], asyncio.Event()

        def take_time() -> None:
            passed_on.append("slow")
            loop.now_s += 0.01

        async def reader() -> None:
            await woken.wait()
            take_time()

        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)
        rounds.add(woken.set if in_a_task else take_time)
        await turns()
        for number in range(3):
            rounds.add(lambda number=number: passed_on.append(number))
            loop.now_s += 0.003
            await turns()
        assert passed_on == ["slow"], "0.009 s of 0.01"
        loop.now_s += 0.002
        await turns()
        assert passed_on == ["slow", 0, 1, 2]
        reading.cancel()

    on_stepped_loop(test)


def test_what_comes_during_a_round_has_the_next_one() -> None:
    async def test(loop: SteppedLoop) -> None:
        rounds, passed_on = Rounds(), []

        def slow() -> None:
            loop.now_s += 0.01
            rounds.add(lambda: passed_on.append("next"))

        rounds.add(slow)
        await turns()
        assert passed_on == []
        loop.now_s += 0.0101
        await turns()
        assert passed_on == ["next"]

    on_stepped_loop(test)


def test_a_round_that_took_long_for_something_else_delays_the_next_by_no_more_than_the_bound() -> None:
    async def test(loop: SteppedLoop) -> None:
        rounds, passed_on = Rounds(), []

        def very_slow() -> None:
            loop.now_s += 100 * MOST_PAUSE_S

        rounds.add(very_slow)
        await turns()
        rounds.add(lambda: passed_on.append(1))
        loop.now_s += MOST_PAUSE_S * 1.01
        await turns()
        assert passed_on == [1]

    on_stepped_loop(test)
