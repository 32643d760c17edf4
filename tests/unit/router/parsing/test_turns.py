import asyncio

import pytest

from router.errors import ApiError
from router.parsing.turns import Turns


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def ask(turns: Turns, client: str, begun: list[str]) -> asyncio.Task[None]:
    async def take() -> None:
        await turns.take(client)
        begun.append(client)

    return asyncio.create_task(take())


async def test_a_client_with_many_costly_bodies_leaves_a_process_to_the_others():
    turns, begun = Turns(num_processes=2, max_parsing=99), list[str]()
    many = [ask(turns, "many", begun) for _ in range(8)]
    await settle()
    assert begun == ["many"]
    few = ask(turns, "few", begun)
    await settle()
    assert begun == ["many", "few"]
    for task in (*many, few):
        task.cancel()


async def test_clients_take_turns_at_one_process():
    turns, begun = Turns(num_processes=1, max_parsing=99), list[str]()
    asking = [ask(turns, client, begun) for client in ("many", "many", "many", "few")]
    await settle()
    for _ in range(3):
        turns.give_back(begun[-1])
        await settle()
    assert begun == ["many", "many", "few", "many"]
    assert all(task.done() for task in asking)


async def test_beyond_the_limit_the_client_with_the_most_bodies_is_refused():
    turns, begun = Turns(num_processes=1, max_parsing=3), list[str]()
    many = [ask(turns, "many", begun) for _ in range(3)]
    await settle()
    few = ask(turns, "few", begun)
    await settle()
    with pytest.raises(ApiError, match="max_parsing is 3") as refused:
        await many[2]
    assert (refused.value.status, refused.value.code) == (429, "too_many_parsing")
    for _ in range(2):
        turns.give_back("many")
        await settle()
    assert begun == ["many", "many", "few"] and few.done()


async def test_a_client_that_leaves_as_its_turn_begins_gives_it_back():
    turns, begun = Turns(num_processes=1, max_parsing=9), list[str]()
    ask(turns, "one", begun)
    second, third = ask(turns, "one", begun), ask(turns, "one", begun)
    await settle()
    turns.give_back("one")
    second.cancel()
    await settle()
    assert begun == ["one", "one"]
    assert second.cancelled() and third.done()
