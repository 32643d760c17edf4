"""The keys of a prompt."""

import asyncio

from headrace.cache.hashing import HASHED_AT_ONCE, prefix_keys
from headrace.cache.known_prompts import KnownPrompts
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from router.requests.prompt_keys import PromptKeys

LONG = 4 * HASHED_AT_ONCE + 5


def request(length: int) -> Request:
    return Request("r", TokenArray.of(range(length)), 40, Sampling(max_tokens=9, seed=0), salt=b"tenant")


async def test_keys_are_those_of_the_tokens_so_far_and_hashed_once() -> None:
    keys, known = PromptKeys(), KnownPrompts()
    for length in (40, LONG):
        first = (await keys.of(request(length), {16}, known))[16]
        assert first == prefix_keys(range(length), 16, b"tenant")
        both = await keys.of(request(length), {16, 32}, known)
        assert both[16] is first
        assert both[32] == prefix_keys(range(length), 32, b"tenant")


async def test_the_event_loop_does_other_work_while_a_long_prompt_is_hashed() -> None:
    hashing = asyncio.create_task(PromptKeys().of(request(LONG), {16}, KnownPrompts()))
    num_turns = 0
    while not hashing.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > LONG // HASHED_AT_ONCE


async def test_the_next_turn_of_a_chat_is_hashed_from_the_end_of_the_last_one() -> None:
    known = KnownPrompts()
    turn, next_turn = request(LONG), request(LONG + 100)
    first = (await PromptKeys().of(turn, {16}, known))[16]
    second = (await PromptKeys().of(next_turn, {16}, known))[16]
    assert second == prefix_keys(range(LONG + 100), 16, b"tenant")
    assert second[0] is first[0], "the very key that is known"
