import asyncio

from router.api.output_queue import OutputQueue


async def test_drivers_wait_while_too_much_is_unread_and_go_on_once_it_is_taken():
    queue: OutputQueue[str] = OutputQueue(max_bytes=100)
    queue.put(0, "a", 60)
    await queue.room()
    queue.put(1, "b", 60)  # another choice of the same client: they share the bound
    waiting = asyncio.create_task(queue.room())
    await asyncio.sleep(0)
    assert not waiting.done() and not queue.has_room
    assert await anext(queue.batches()) == [(0, "a"), (1, "b")]
    await waiting
    assert queue.has_room and queue.num_bytes == 0


async def test_one_output_larger_than_the_bound_passes():
    queue: OutputQueue[str] = OutputQueue(max_bytes=1)
    queue.put(0, "a", 1000)
    assert await anext(queue.batches()) == [(0, "a")]
    assert queue.has_room
