"""A bounded pool: first come, first served, and every buffer comes back."""

import asyncio

import pytest

from transfer.protocol.errors import LayoutMismatch, TransferTimeout
from transfer.staging import Staging, StagingConfig


@pytest.fixture
def staging():
    return Staging(StagingConfig(num_buffers=2, buffer_bytes=100))


def now():
    return asyncio.get_running_loop().time()


async def hold(staging, order, name, release):
    async with staging.hold(10, now() + 5):
        order.append(name)
        await release.wait()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_buffer_is_cut_to_size_and_comes_back(staging):
    async with staging.hold(30, now() + 1) as buffer:
        assert buffer.payload.nbytes == 30
        assert staging.num_free == 1
        staging.check()
    assert staging.num_free == 2
    staging.check()


async def test_buffers_held_together_do_not_overlap(staging):
    async with staging.hold(100, now() + 1) as one, staging.hold(100, now() + 1) as two:
        one.payload[:] = 1
        two.payload[:] = 2
        assert one.payload.sum() == 100
        assert two.payload.sum() == 200


async def test_waiters_are_served_in_order(staging):
    order, releases, tasks = [], [asyncio.Event() for _ in range(5)], []
    for name, release in enumerate(releases):
        tasks.append(asyncio.create_task(hold(staging, order, name, release)))
        await settle()
        staging.check()
    assert order == [0, 1]
    releases[1].set()
    await settle()
    assert order == [0, 1, 2]
    for release in releases:
        release.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert staging.num_free == 2
    staging.check()


async def test_a_waiter_gives_up_at_its_deadline_and_loses_nothing(staging):
    async with staging.hold(1, now() + 5), staging.hold(1, now() + 5):
        with pytest.raises(TransferTimeout, match="raise num_buffers"):
            async with staging.hold(1, now() + 0.02):
                pass
        staging.check()
    assert staging.num_free == 2
    staging.check()


async def test_a_buffer_granted_to_a_waiter_that_is_cancelled_goes_to_the_next(staging):
    order, first, second = [], asyncio.Event(), asyncio.Event()
    async with staging.hold(1, now() + 5):
        async with staging.hold(1, now() + 5):
            doomed = asyncio.create_task(hold(staging, order, "doomed", first))
            heir = asyncio.create_task(hold(staging, order, "heir", second))
            await settle()
        doomed.cancel()  # granted just now, not yet run
        await settle()
        staging.check()
        assert order == ["heir"]
        second.set()
        await heir
    assert doomed.cancelled()
    assert staging.num_free == 2
    staging.check()


async def test_a_message_that_fits_no_buffer_is_refused_at_once(staging):
    with pytest.raises(LayoutMismatch, match=r"101 bytes > staging buffer_bytes 100: raise"):
        async with staging.hold(101, now() + 1):
            pass


async def test_an_error_inside_gives_the_buffer_back(staging):
    with pytest.raises(RuntimeError):
        async with staging.hold(1, now() + 1):
            raise RuntimeError
    assert staging.num_free == 2


@pytest.mark.parametrize("sizes", [(0, 10), (2, 0)])
def test_a_pool_without_room_is_refused(sizes):
    with pytest.raises(LayoutMismatch, match="< 1"):
        StagingConfig(*sizes)


async def test_a_peer_that_takes_nothing_leaves_half_of_the_buffers_to_others():
    staging = Staging(StagingConfig(num_buffers=4, buffer_bytes=100))
    for peer in ("slow", "other"):
        staging.session_opened(peer)
    held = [await staging.take(1, now() + 5, "slow") for _ in range(2)]
    third = asyncio.create_task(staging.take(1, now() + 60, "slow"))
    await settle()
    assert not third.done()
    staging.check()
    for _ in range(3):
        both = [await staging.take(1, now() + 5, "other") for _ in range(2)]
        for buffer in both:
            staging.give(buffer, "other")
        staging.check()
    assert not third.done()
    staging.give(held.pop(), "slow")
    held.append(await third)
    for buffer in held:
        staging.give(buffer, "slow")
    assert staging.num_free == 4
    staging.check()


async def test_a_peer_alone_has_all_buffers():
    staging = Staging(StagingConfig(num_buffers=4, buffer_bytes=100))
    staging.session_opened("one")
    held = [await staging.take(1, now() + 5, "one") for _ in range(4)]
    assert staging.num_free == 0
    for buffer in held:
        staging.give(buffer, "one")
    staging.check()


async def test_a_peer_gets_what_it_waits_for_when_the_others_sessions_end():
    staging = Staging(StagingConfig(num_buffers=2, buffer_bytes=100))
    for peer in ("one", "other"):
        staging.session_opened(peer)
    first = await staging.take(1, now() + 5, "one")
    second = asyncio.create_task(staging.take(1, now() + 60, "one"))
    await settle()
    assert not second.done()
    staging.session_ended("other")
    for buffer in (first, await second):
        staging.give(buffer, "one")
    staging.check()
