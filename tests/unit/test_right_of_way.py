"""An event loop that follows a right of way waits while it is taken, and never for long."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest
import uvloop

from headrace.right_of_way import LONGEST_S, TOKEN_TURNS, RightOfWay
from tests.support.patience import PATIENCE_S

HELD_S = 5.0
"""After so long an engine gives the way by itself: a loop that waits for ever fails a test, and does not hang."""


class Engine:
    """A thread that takes the right of way as long as the block runs, or until `give`."""

    def __init__(self, right_of_way: RightOfWay) -> None:
        self.happened: list[str] = []
        self._right_of_way = right_of_way
        self._taken, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._taken.wait(PATIENCE_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.give()
        self._thread.join(PATIENCE_S)

    def give(self) -> None:
        self._may_end.set()

    def _run(self) -> None:
        with self._right_of_way.taken():
            self._taken.set()
            self._may_end.wait(HELD_S)
            self.happened.append("given")


class CountedWay(RightOfWay):
    """Counts the turns of a loop that have to wait, none of them for long."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        is_free = self._is_free

        class Counted:
            def wait(_, timeout: float) -> None:
                self.num_waits += not is_free.is_set()

            def __getattr__(_, name: str) -> Any:
                return getattr(is_free, name)

        self._is_free = Counted()  # type: ignore[assignment]


def later(do: Callable[[], None]) -> None:
    """In another thread, once the loop has come to wait."""
    timer = threading.Timer(0.05, do)
    timer.daemon = True
    timer.start()


@pytest.mark.parametrize("comes_during_select", [False, True])
async def test_what_comes_while_it_is_taken_is_handled_once_it_is_given(comes_during_select: bool) -> None:
    right_of_way, loop = RightOfWay(longest_s=PATIENCE_S), asyncio.get_running_loop()
    right_of_way.followed_by(loop)
    handled = loop.create_future()
    with Engine(right_of_way) as engine:

        def handle() -> None:
            engine.happened.append("handled")
            handled.set_result(None)

        def come() -> None:
            loop.call_soon_threadsafe(handle)
            later(engine.give)

        later(come) if comes_during_select else come()
        await handled
        assert engine.happened == ["given", "handled"]


async def test_an_engine_that_hangs_holds_the_loop_up_for_a_bounded_time() -> None:
    assert LONGEST_S <= 0.02, "a turn's; a call takes several"
    right_of_way = RightOfWay()
    right_of_way.followed_by(asyncio.get_running_loop())
    with Engine(right_of_way) as engine:
        await asyncio.sleep(0)
        assert engine.happened == [], "the loop went on although it was not given"


async def test_tokens_go_through_while_it_is_taken() -> None:
    right_of_way, loop = RightOfWay(longest_s=PATIENCE_S), asyncio.get_running_loop()
    right_of_way.followed_by(loop)
    news, written = asyncio.Event(), loop.create_future()

    async def feed() -> None:
        await news.wait()
        written.set_result(None)

    feeding = asyncio.create_task(feed())
    await asyncio.sleep(0)
    with Engine(right_of_way) as engine:
        right_of_way.let_tokens_through()
        loop.call_soon_threadsafe(news.set)
        await written
        assert engine.happened == []
    await feeding


async def test_only_a_few_turns_go_through_and_none_behind_the_next_wait_for_the_device() -> None:
    right_of_way = CountedWay()
    right_of_way.followed_by(asyncio.get_running_loop())
    with right_of_way.taken():
        right_of_way.let_tokens_through()
        for _ in range(TOKEN_TURNS + 2):
            await asyncio.sleep(0)
        assert right_of_way.num_waits == 2
        right_of_way.let_tokens_through()
        with right_of_way.given():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert right_of_way.num_waits == 3
    await asyncio.sleep(0)
    assert right_of_way.num_waits == 3, "it is free"


def test_it_is_as_before_behind_a_wait() -> None:
    right_of_way = RightOfWay()
    with right_of_way.given():
        assert right_of_way.is_free
    assert right_of_way.is_free, "nobody had taken it"
    with pytest.raises(KeyError), right_of_way.taken():
        assert not right_of_way.is_free
        with pytest.raises(ValueError), right_of_way.given():
            assert right_of_way.is_free
            raise ValueError
        assert not right_of_way.is_free
        right_of_way.let_tokens_through()
        assert not right_of_way.is_free
        raise KeyError
    assert right_of_way.is_free, "a step that fails gives it, too"


async def test_a_loop_that_follows_sleeps_and_can_be_let_off() -> None:
    right_of_way, loop = CountedWay(), asyncio.get_running_loop()
    selector: Any = loop._selector  # type: ignore[attr-defined]
    select, timeouts = selector.select, list[float | None]()
    selector.select = lambda timeout=None: (timeouts.append(timeout), select(timeout))[1]
    undo = right_of_way.followed_by(loop)
    await asyncio.sleep(0.02)
    assert max(timeout or 0.0 for timeout in timeouts) > 0.01, "it sleeps until something is due"
    undo()
    with right_of_way.taken():
        await asyncio.sleep(0)
    assert right_of_way.num_waits == 0


def test_a_loop_without_a_selector_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def follow() -> None:
        RightOfWay().followed_by(asyncio.get_running_loop())()

    uvloop.run(follow())
    assert "no selector" in caplog.text
