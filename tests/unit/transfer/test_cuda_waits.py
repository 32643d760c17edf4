"""Waiting for a stream: one poller, in the stream's order; a stand-in for the device's events."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.patience import PATIENCE_S
from transfer.cuda_waits import StreamWaits


class Stream:
    """Work is numbered as it is enqueued; `done` of it is done."""

    def __init__(self):
        self.enqueued = 0
        self.done = 0
        self.error = None
        self.queries = 0
        self.loop_thread = threading.current_thread()
        self.asked_by_the_loop = 0


class StandIn:
    """An event of that stream."""

    made = 0

    def __init__(self):
        StandIn.made += 1

    def record(self, stream):
        self.stream, self.behind = stream, stream.enqueued

    def query(self):
        self.stream.queries += 1
        self.stream.asked_by_the_loop += threading.current_thread() is self.stream.loop_thread
        if self.stream.error is not None:
            raise self.stream.error
        return self.behind <= self.stream.done

    def synchronize(self):
        give_up_s = time.monotonic() + 5
        while not self.query():
            assert time.monotonic() < give_up_s
            time.sleep(0.001)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def waits_of(threads, spin_s=60.0):
    StandIn.made = 0
    return StreamWaits(StandIn, threads, spin_s)


def enqueue(waits, stream, result=None):
    stream.enqueued += 1
    return waits.until_done(stream, result)


async def turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("spin_s", [60.0, 0.0])
async def test_each_is_done_when_its_work_is_and_no_sooner(threads, spin_s):
    waits, stream = waits_of(threads, spin_s), Stream()
    futures = [enqueue(waits, stream, name) for name in "abc"]
    await turns()
    assert not any(future.done() for future in futures)
    for number, name in enumerate("abc", start=1):
        stream.done = number
        assert await asyncio.wait_for(futures[number - 1], PATIENCE_S) == name
        assert [future.done() for future in futures] == [at < number for at in range(3)]


async def test_whoever_else_waits_costs_nothing(threads):
    waits, stream = waits_of(threads), Stream()
    futures = [enqueue(waits, stream) for _ in range(100)]
    await turns(10)
    assert stream.queries <= 11
    stream.done = 100
    await asyncio.gather(*futures)
    await turns()
    asked = stream.queries
    await turns()
    assert stream.queries == asked  # nobody waits: nobody asks


async def test_events_are_used_again(threads):
    waits, stream = waits_of(threads), Stream()
    for number in range(1, 50):
        future = enqueue(waits, stream)
        stream.done = number
        await future
    assert StandIn.made == 1


async def test_what_takes_long_is_left_to_a_thread(threads):
    waits, stream = waits_of(threads, spin_s=0.0), Stream()
    future = enqueue(waits, stream, "done")
    await turns(50)
    assert not future.done() and stream.asked_by_the_loop <= 2
    stream.done = 1
    assert await asyncio.wait_for(future, PATIENCE_S) == "done"
    assert stream.asked_by_the_loop <= 3  # once more when the thread has woken up


@pytest.mark.parametrize("spin_s", [60.0, 0.0])
async def test_a_failed_device_fails_all_who_wait_and_the_next(threads, spin_s):
    waits, stream = waits_of(threads, spin_s), Stream()
    futures = [enqueue(waits, stream) for _ in range(3)]
    await turns()
    stream.error = RuntimeError("illegal memory access")
    for future in futures:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await asyncio.wait_for(future, PATIENCE_S)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await asyncio.wait_for(enqueue(waits, stream), 5)


async def test_a_waiter_that_gave_up_holds_up_nobody(threads):
    waits, stream = waits_of(threads), Stream()
    doomed, heir = enqueue(waits, stream), enqueue(waits, stream, "heir")
    doomed.cancel()
    stream.done = 2
    assert await asyncio.wait_for(heir, PATIENCE_S) == "heir"
