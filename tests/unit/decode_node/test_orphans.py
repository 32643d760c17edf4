"""Requests whose router was lost: which ones another router continues, and how long they are kept."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from decode_node.orphans import MAX_ORPHANS, AnswerSoFar, Orphans
from headrace.request import FinishReason, Logprobs, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.wire.messages import Tokens
from tests.support.patience import PATIENCE_S

REQUEST = Request("r-0", TokenArray.of((1, 2, 3)), 3, Sampling(max_tokens=9, seed=4), salt=b"mine", is_resumable=True)


def tokens(*ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(tuple(Token(each) for each in ids), finish)


def answer(request: Request = REQUEST, *parts: Tokens) -> AnswerSoFar:
    made = AnswerSoFar(request)
    for part in parts or (tokens(7), tokens(8, 9)):
        made.add(part)
    return made


# ---------------------------------------------------------------- the answer so far


def test_an_answer_is_whole_with_the_log_probabilities_that_were_asked_for() -> None:
    asked = replace(REQUEST, sampling=replace(REQUEST.sampling, logprobs=0))
    drawn_here, came_with_a_transfer = Tokens((Token(7, Logprobs(-0.5)),)), tokens(7)
    assert answer(asked, drawn_here).is_whole
    assert not answer(asked, came_with_a_transfer, drawn_here).is_whole
    moved = replace(asked, tokens=TokenArray.of((1, 2, 3, 5)))
    assert not answer(moved, drawn_here).is_whole, "another node has drawn the first"
    assert answer(REQUEST, came_with_a_transfer).is_whole


def test_the_same_request_gets_the_whole_answer_so_far() -> None:
    again = replace(REQUEST, age_s=3.0, boundaries=(2,))
    assert answer().fits(again)
    assert answer().beyond(again) == tokens(7, 8, 9)


def test_the_finish_reason_comes_with_the_last_token() -> None:
    done = answer(REQUEST, tokens(7), tokens(8, finish=FinishReason.LENGTH))
    assert done.beyond(REQUEST) == tokens(7, 8, finish=FinishReason.LENGTH)


def test_a_request_that_was_migrated_here_is_answered_from_the_first_token_on() -> None:
    migrated = replace(REQUEST, tokens=TokenArray.of((1, 2, 3, 5, 6)))
    assert answer(migrated).fits(REQUEST)
    assert answer(migrated).beyond(REQUEST) == tokens(5, 6, 7, 8, 9)


def test_a_router_that_has_shown_some_tokens_gets_the_others() -> None:
    shown = replace(REQUEST, tokens=TokenArray.of((1, 2, 3, 7, 8)))
    assert answer().fits(shown)
    assert answer().beyond(shown) == tokens(9)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"another tenant's"},
        {"salt": b""},
        {"tokens": (1, 2, 4)},
        {"tokens": (1, 2), "num_prompt_tokens": 2},
        {"tokens": (1, 2, 3, 7), "num_prompt_tokens": 4},
        {"tokens": (1, 2, 3, 7, 5)},
        {"tokens": (1, 2, 3, 7, 8, 9, 10)},
        {"sampling": Sampling(max_tokens=9, seed=5)},
        {"sampling": Sampling(max_tokens=8, seed=4)},
    ],
)
def test_another_request_with_the_same_id_is_not_the_same(other: dict) -> None:
    assert not answer().fits(replace(REQUEST, **other))


def test_of_a_request_that_nobody_can_ask_for_again_no_token_is_kept() -> None:
    plain = replace(REQUEST, is_resumable=False)
    assert answer(plain).beyond(plain) == tokens()


# ---------------------------------------------------------------- those that are kept


@dataclass
class Running:
    request: Request
    given_up: int = 0

    def continues(self, request: Request) -> bool:
        return request.salt == self.request.salt

    async def give_up(self) -> None:
        self.given_up += 1


def running(request_id: str = "r-0") -> Running:
    return Running(replace(REQUEST, request_id=request_id))


class Changes:
    count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_an_orphan_is_taken_once_and_only_by_its_own_request() -> None:
    changed = Changes()
    orphans = Orphans[Running](PATIENCE_S, changed)
    orphan = running()
    assert orphans.keep(orphan)
    assert (orphans.ids, changed.count) == (("r-0",), 1)
    assert orphans.take(replace(REQUEST, request_id="r-1")) is None
    assert orphans.take(replace(REQUEST, salt=b"another")) is None
    assert orphans.take(REQUEST) is orphan
    assert (orphans.ids, changed.count) == ((), 2)
    assert orphans.take(REQUEST) is None
    await orphans.close()
    assert orphan.given_up == 0, "whoever took it ends it"


async def test_an_orphan_without_a_taker_is_given_up_after_its_time() -> None:
    changed = Changes()
    orphans = Orphans[Running](0.05, changed)
    orphan = running()
    assert orphans.keep(orphan)
    async with asyncio.timeout(PATIENCE_S):
        while not orphan.given_up:
            await asyncio.sleep(0.005)
    assert (orphans.ids, changed.count, orphan.given_up) == ((), 2, 1)


async def test_an_orphan_whose_router_needs_it_no_longer_is_given_up_at_once() -> None:
    changed = Changes()
    orphans = Orphans[Running](PATIENCE_S, changed)
    mine, anothers = running("mine"), running("another router's")
    assert orphans.keep(mine) and orphans.keep(anothers)
    await orphans.abandon(["unknown", "mine"])
    assert (orphans.ids, changed.count) == (("another router's",), 3)
    await orphans.close()
    assert (mine.given_up, anothers.given_up) == (1, 1)


async def test_only_so_many_are_kept_and_one_of_each_id() -> None:
    orphans = Orphans[Running](PATIENCE_S, Changes())
    kept = [running(f"r-{index}") for index in range(MAX_ORPHANS)]
    assert all(orphans.keep(orphan) for orphan in kept)
    assert not orphans.keep(running("one more"))
    assert orphans.take(REQUEST) is kept[0]
    assert not orphans.keep(running("r-1"))
    assert orphans.keep(running("one more"))
    await orphans.close()
    assert [orphan.given_up for orphan in kept] == [0, *[1] * (MAX_ORPHANS - 1)]


async def test_a_node_that_stops_keeps_none() -> None:
    orphans = Orphans[Running](PATIENCE_S, Changes())
    await orphans.close()
    assert not orphans.keep(running())
