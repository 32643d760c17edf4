"""The cache of a node in simulated arrangements, and the chats that fit into it."""

import pytest
import typer

from benchmarks.cluster.arrangements import LOADS, Work
from benchmarks.cluster.kinds import KINDS, Chunks
from benchmarks.cluster.twin import Measured, simulated
from benchmarks.router.arrangements import LINK, NODE_TOKENS, USUAL, node_cache
from benchmarks.router.host import NO_HOST
from benchmarks.router.workload import Chats, ChatShape

SHORT, LONG = Work("48 chats", LOADS["48 chats"], 0.01), Work("long", LOADS["long"], None)


def test_a_cache_has_a_slot_for_each_8192_of_its_tokens_or_as_many_as_asked_for() -> None:
    assert node_cache(NODE_TOKENS, None, [SHORT]) == (260_000, 507)
    assert node_cache(1_400_000, None, [SHORT, LONG]) == (87_500, 170)
    assert node_cache(1_400_000, 28, [SHORT, LONG]) == (87_500, 28)


def test_a_small_cache_has_a_slot() -> None:
    one_turn = Work("decode-heavy", LOADS["decode-heavy"], None)
    assert node_cache(2048, None, [one_turn]) == (128, 1)


@pytest.mark.parametrize(("works", "least"), [([SHORT], 24_576), ([SHORT, LONG], 95_872)])
def test_a_cache_too_small_for_a_chat_is_refused_with_the_least_that_is_enough(works: list[Work], least: int) -> None:
    assert node_cache(least, None, works)
    with pytest.raises(typer.BadParameter, match=rf"{least - 1:,} .* '{works[-1].load}': give {least:,} or more"):
        node_cache(least - 1, None, works)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_cache_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(typer.BadParameter, match=f"--node-slots {num_slots}: .* give 1 or more"):
        node_cache(1_400_000, num_slots, [SHORT])


def test_last_tokens_are_those_of_a_chat_whose_turns_have_all_been_answered() -> None:
    shape = ChatShape(at_once=1, first=300, new=70, answer=20, turns=3, total=1)
    chats = Chats(shape, 128)
    (turn,) = chats.arrivals()
    while (following := chats.after(turn, 0.0)) is not None:
        turn = following
    assert turn.num_tokens + turn.answer_tokens == shape.last_tokens == 500


@pytest.mark.parametrize("kind", KINDS)
def test_chats_end_where_a_cache_holds_one_of_them(kind: str) -> None:
    shape = ChatShape(at_once=4, first=300, new=70, answer=20, turns=3, total=24)
    measured = Measured(USUAL, None, LINK, *node_cache(512, None, [Work("small", shape, None)]))
    result = simulated(KINDS[kind], 2, shape, measured, Chunks(256, 256), None, NO_HOST)
    assert result.requests_per_s > 0
