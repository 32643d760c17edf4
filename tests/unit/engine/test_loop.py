"""The engine's thread as its callers see it."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.cache.errors import CorruptCache
from headrace.engine.loop import EngineLoop, EngineLost
from headrace.right_of_way import RightOfWay
from tests.support.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S


class SteppedEngine:
    """Always has work; each step waits until the test lets it go."""

    has_work = True
    host_share_s = math.inf
    spare_s = 0.0
    is_admitting = False

    def __init__(self) -> None:
        self.right_of_way = RightOfWay()
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def admit(self, within_s: float) -> None:
        pass

    def step(self) -> bool:
        self.begun.release()
        return self.may_end.acquire(timeout=TIMEOUT_S)


async def end(loop: EngineLoop, engine: SteppedEngine) -> None:
    stopping = asyncio.create_task(loop.stop(TIMEOUT_S))
    await asyncio.sleep(0)  # the end is in the queue: at most two more steps begin
    engine.may_end.release(2)
    await stopping


async def test_a_call_that_comes_after_the_last_commands_were_run_fails_instead_of_waiting_for_ever() -> None:
    engine: Any = SteppedEngine()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    loop.start()
    await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
    stopping = asyncio.create_task(loop.stop(TIMEOUT_S))
    await asyncio.sleep(0)  # the end is in the queue, behind the first step
    engine.may_end.release()
    await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)  # the queue was run; this is the last step
    late = asyncio.create_task(loop.call(lambda: None))
    await asyncio.sleep(0)
    engine.may_end.release()
    await stopping
    with pytest.raises(EngineLost):
        async with asyncio.timeout(TIMEOUT_S):
            await late


async def test_commands_beside_a_step_leave_time_for_the_next_and_none_is_lost() -> None:
    engine: Any = SteppedEngine()
    engine.host_share_s = 1.0
    now_s, ran = [0.0], []
    loop = EngineLoop(engine, lambda: now_s[0], lambda error: None)

    def command(number: int, seconds: float) -> None:
        now_s[0] += seconds
        ran.append(number)

    for number, seconds in enumerate((0.5, 0.4, 0.3, 2.0, 0.1)):
        loop.post(lambda number=number, seconds=seconds: command(number, seconds))
    loop.start()
    for expected in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]):
        await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
        assert ran == expected
        engine.may_end.release()
    await end(loop, engine)


async def test_a_step_that_may_be_left_open_is_made_when_time_is_up_with_what_came_meanwhile() -> None:
    engine: Any = SteppedEngine()
    engine.spare_s = math.inf  # the device has enough to do
    admitted: list[list[str]] = []
    commands: list[str] = []
    engine.admit = lambda within_s: admitted.append([*commands])
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    loop.start()
    for name in ("first", "second"):
        async with asyncio.timeout(TIMEOUT_S):
            await loop.call(lambda name=name: commands.append(name))
    assert not engine.begun.acquire(blocking=False), "there is time"
    engine.spare_s = 0.0
    assert await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
    assert ["first"] in admitted, "each is admitted as it comes, not only when the step is made"
    assert admitted[-1] == ["first", "second"]
    await end(loop, engine)


async def test_a_command_that_came_during_a_step_is_answered_though_the_next_one_is_left_open() -> None:
    engine: Any = SteppedEngine()
    admitted: list[list[str]] = []
    commands: list[str] = []
    engine.admit = lambda within_s: admitted.append([*commands])
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    loop.start()
    await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
    called = asyncio.create_task(loop.call(lambda: commands.append("came during the step")))
    await asyncio.sleep(0)  # the command is in the queue
    engine.spare_s = math.inf
    engine.may_end.release()
    async with asyncio.timeout(TIMEOUT_S):
        await called
    assert admitted[-1] == commands == ["came during the step"], "admitted before it was answered"
    await end(loop, engine)


async def test_tokens_that_a_step_brings_go_through_and_nothing_else_does() -> None:
    engine: Any = SteppedEngine()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    happened: list[str] = []
    step = engine.step

    def step_with_a_token() -> bool:
        did_something = step()
        if not happened:
            loop.deliver(happened.append, "token")
        return did_something

    engine.step = step_with_a_token
    engine.right_of_way.let_tokens_through = lambda: happened.append("through")
    answered = asyncio.Event()
    loop.post(lambda: loop.deliver(answered.set))  # no token
    loop.start()
    async with asyncio.timeout(TIMEOUT_S):
        await answered.wait()
    await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
    assert not happened
    for _ in range(2):
        engine.may_end.release()
        await asyncio.to_thread(engine.begun.acquire, timeout=TIMEOUT_S)
    assert happened.count("through") == 1, "the second step brings nothing"
    await end(loop, engine)


async def test_an_open_step_does_not_keep_the_thread_from_its_end() -> None:
    engine: Any = SteppedEngine()
    engine.spare_s = math.inf
    engine.may_end.release()  # the last step
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    loop.start()
    await loop.stop(TIMEOUT_S)


class IdleEngine:
    """Has nothing to do, and pools that are sound until `corrupt`."""

    has_work = False
    host_share_s = math.inf
    spare_s = 0.0
    suspects = frozenset()
    sequences = ()

    def __init__(self) -> None:
        self.right_of_way = RightOfWay()
        self.cache = self
        self.num_checks = 0
        self.num_slices = 1
        self.num_slices_done = 0
        self.in_slice: Callable[[], None] = lambda: None
        self.checked = threading.Event()
        self.corrupt = False

    def admit(self, within_s: float) -> None:
        pass

    def step(self) -> bool:
        return False

    def next_deadline_s(self) -> float | None:
        return None

    def pool_checks(self) -> Iterator[None]:
        for _ in range(self.num_slices):
            yield
            self.num_slices_done += 1
            self.in_slice()
        self.num_checks += 1
        self.checked.set()
        if self.corrupt:
            raise CorruptCache("free 1 + cached 0 + in use 0 != total 2")


async def test_pools_are_checked_whenever_the_engine_falls_idle_and_corrupt_ones_end_the_node(monkeypatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.IDLE_CHECK_S", 0.01)
    engine: Any = IdleEngine()
    crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, crashed.set_result)
    loop.start()
    await asyncio.to_thread(engine.checked.wait, TIMEOUT_S)
    await asyncio.sleep(0.1)  # idle all the time
    assert engine.num_checks == 1

    def corrupt() -> None:
        engine.corrupt = True

    await loop.call(corrupt)
    async with asyncio.timeout(TIMEOUT_S):
        assert isinstance(await crashed, CorruptCache)
    assert engine.num_checks == 2
    await loop.stop(TIMEOUT_S)


async def test_a_command_does_not_wait_for_the_check_of_all_pools(monkeypatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.IDLE_CHECK_S", 0.01)
    engine: Any = IdleEngine()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: None)
    ran_after: list[int] = []

    def command() -> None:
        ran_after.append(engine.num_slices_done)
        engine.in_slice = lambda: None

    engine.num_slices = 1000
    engine.in_slice = lambda: loop.post(command) if engine.num_slices_done == 3 else None
    loop.start()
    await asyncio.to_thread(engine.checked.wait, TIMEOUT_S)
    assert ran_after == [3]
    assert engine.num_slices_done == 3 + 1000, "it began again: the command may have changed the pools"
    await loop.stop(TIMEOUT_S)
