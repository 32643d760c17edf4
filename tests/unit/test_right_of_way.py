"""An event loop that follows a right of way waits while it is taken, and never for long."""

import asyncio
import threading
import time

import pytest
import uvloop

import headrace.right_of_way
from headrace.right_of_way import RightOfWay
from tests.support.patience import PATIENCE_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.right_of_way, "LONGEST_S", PATIENCE_S)


class Engine:
    """A thread that takes the right of way until the test lets it go on, then gives it for as long."""

    def __init__(self, right_of_way: RightOfWay) -> None:
        self.taken, self.given = threading.Event(), threading.Event()
        self.may_give, self.may_end = threading.Event(), threading.Event()
        self._right_of_way = right_of_way
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.taken.wait(PATIENCE_S)

    def _run(self) -> None:
        with self._right_of_way.taken():
            self.taken.set()
            self.may_give.wait(PATIENCE_S)
            with self._right_of_way.given():
                self.given.set()
                self.may_end.wait(PATIENCE_S)

    def end(self) -> None:
        self.may_give.set()
        self.may_end.set()
        self._thread.join(PATIENCE_S)


async def test_what_comes_while_it_is_taken_is_handled_once_it_is_given(patient: None) -> None:
    right_of_way, loop, order = RightOfWay(), asyncio.get_running_loop(), list[str]()
    right_of_way.followed_by(loop)
    engine = Engine(right_of_way)
    handled = loop.create_future()

    def handle() -> None:
        order.append("handled")
        handled.set_result(None)

    def give() -> None:
        order.append("given")
        engine.may_give.set()

    loop.call_soon(handle)
    timer = threading.Timer(0.05, give)
    timer.start()
    async with asyncio.timeout(PATIENCE_S):
        await handled
    assert order == ["given", "handled"]
    timer.join(PATIENCE_S)
    engine.end()


async def test_an_engine_that_hangs_holds_the_loop_up_for_a_bounded_time() -> None:
    right_of_way, loop = RightOfWay(), asyncio.get_running_loop()
    right_of_way.followed_by(loop)
    engine = Engine(right_of_way)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.sleep(0)
    assert engine.taken.is_set() and not engine.given.is_set(), "the loop went on although it was never given"
    engine.end()


async def test_tokens_pass_while_it_is_taken(patient: None) -> None:
    right_of_way, loop = RightOfWay(), asyncio.get_running_loop()
    right_of_way.followed_by(loop)
    engine = Engine(right_of_way)
    news, written = asyncio.Event(), loop.create_future()

    async def feed() -> None:
        await news.wait()
        written.set_result(None)

    right_of_way.let_pass()
    feeding = asyncio.create_task(feed())
    loop.call_soon_threadsafe(news.set)
    async with asyncio.timeout(PATIENCE_S / 2):
        await written
    await feeding
    assert not engine.given.is_set()
    engine.end()


def test_it_is_as_before_behind_a_wait() -> None:
    right_of_way = RightOfWay()
    with right_of_way.given():
        assert right_of_way.is_free
    assert right_of_way.is_free, "nobody had taken it"
    with pytest.raises(KeyError), right_of_way.taken():
        assert not right_of_way.is_free
        with right_of_way.given():
            assert right_of_way.is_free
        assert not right_of_way.is_free
        raise KeyError
    assert right_of_way.is_free, "a step that fails gives it, too"


def test_a_loop_without_a_selector_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def follow() -> None:
        RightOfWay().followed_by(asyncio.get_running_loop())

    uvloop.run(follow())
    assert "no selector" in caplog.text


def test_a_loop_waits_only_while_it_is_taken() -> None:
    async def turns() -> float:
        RightOfWay().followed_by(asyncio.get_running_loop())
        began_s = time.perf_counter()
        for _ in range(100):
            await asyncio.sleep(0)
        return time.perf_counter() - began_s

    assert asyncio.run(turns()) < 100 * headrace.right_of_way.LONGEST_S
