import asyncio

from decode_node.inbox import Inbox


async def test_items_come_in_order_and_a_reader_waits_for_the_next() -> None:
    inbox: Inbox[int | str] = Inbox()
    reading = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not reading.done()
    inbox.put(1)
    inbox.put(2)
    assert await reading == 1
    assert await inbox.get() == 2


async def test_looking_takes_only_the_kind_asked_for() -> None:
    inbox: Inbox[int | str] = Inbox()
    assert inbox.take_if(int) is None
    inbox.put("stop")
    inbox.put(3)
    assert inbox.take_if(int) is None
    assert inbox.take_if(str) == "stop"
    assert inbox.take_if(int) == 3
