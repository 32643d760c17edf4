"""Pinned drafts: as many are right as others publish, and the answers are whole and found again."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.pinned_drafts import (
    CYCLE,
    GOLDEN,
    PinnedDrafts,
    RightDrafts,
    tokens_a_step,
    write_drafts_torch,
    write_drafts_triton,
)
from benchmarks.shapes import TINY_MODELS
from headrace.engine.runner import Launched
from headrace.engine.sampling.draw import Draw
from headrace.engine.sampling.sampler import Drawn
from headrace.engine.sequence import Admitted
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.models.logits import Logits
from tests.support.engine.drafters import MTP_DRAFTS, ROOMY, num_drafted, text, together
from tests.support.engine.driving import GREEDY, request, small_engine
from tests.support.engine.interpreted import capture_layer
from tests.support.engine.oracle import random_prompt

MODEL = TINY_MODELS / "headrace-tiny-qwen3.5"
DRAW = Draw(GREEDY, 0)
ANSWER = replace(GREEDY, max_tokens=103)


@pytest.mark.parametrize(("num_drafts", "golden"), [(2, 2.73), (3, 3.39)])
def test_every_cycle_of_checks_has_the_published_mean(num_drafts: int, golden: float) -> None:
    right = RightDrafts(GOLDEN)
    assert tokens_a_step(num_drafts) == pytest.approx(golden)
    for _ in range(3):
        numbers = [right.next(num_drafts) for _ in range(CYCLE)]
        assert 1 + sum(numbers) / CYCLE == pytest.approx(golden)
        assert numbers != sorted(numbers)


def test_without_shares_none_is_right() -> None:
    right = RightDrafts(())
    assert [right.next(3) for _ in range(5)] == [0] * 5


class Runner:
    """A runner whose draws are no drafts, and whose layer drafted 20 to 25 last."""

    def __init__(self) -> None:
        self._drawn = torch.zeros(16, dtype=torch.int64)
        self._sources = CheckSources(self._drawn, torch.arange(20, 26).view(2, 3), torch.zeros(2, dtype=torch.int64))

    def launch(self, inputs: list[SequenceInput], draws: list[tuple[int, Draw]], *rest: Any) -> Launched:
        logits, ids = Logits(torch.zeros(len(draws), 64), 1.0), self._drawn[: len(draws)]
        ids.copy_(1000 + torch.arange(len(draws)))
        return Launched(logits, Drawn(logits, ids, [draw for _, draw in draws]), [])


class Numbers(RightDrafts):
    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)

    def next(self, most: int) -> int:
        return min(most, next(self._numbers))


def tokens_of(inputs: list[SequenceInput], draws: list[tuple[int, Draw]], *right: int) -> list[int]:
    runner = Runner()
    pinned = PinnedDrafts(runner)  # type: ignore[arg-type]
    pinned.right = Numbers(*right)
    tokens = [token.id for token in runner.launch(inputs, draws).drawn.tokens()]
    assert tokens == runner._drawn[: len(draws)].tolist()  # the next launch reads them there
    return tokens


def checked(*tokens: int, future_drafts: int | None = None) -> SequenceInput:
    """A newest token, and drafts behind it."""
    emit = tuple((6 + i, 1 + i) for i in range(len(tokens) - 1))
    return SequenceInput(tokens, 5, range(9), 0, 0, emit, len(tokens), future_drafts=future_drafts)


def test_so_many_drafts_of_each_sequence_are_right_and_the_next_is_not() -> None:
    plain, chunk = SequenceInput([1], 5, range(9), 4, 4), SequenceInput([1, 2], 5, range(9), 5, 5, (), 0)
    last_chunk = SequenceInput([1, 2], 5, range(9), 6, 6)
    inputs = [checked(1, 2, 3, 4), plain, chunk, last_chunk, checked(1, 2), checked(1, 2, 3)]
    tokens = tokens_of(inputs, [(row, DRAW) for row in range(11)], 2, 3, 0)
    assert tokens == [2, 3, 4 ^ 1, 1003, 1004, 1005, 2, 1007, 2 ^ 1, 1009, 1010]


def test_drafts_known_and_made_are_written_alike_in_triton() -> None:
    made, drawn = torch.arange(100, 130).view(10, 3), torch.full((200,), 7)
    places = torch.randperm(200)[:150]
    source = torch.where(torch.rand(150) < 0.5, torch.randint(30, (150,)), -1)
    packed = torch.cat((places, torch.randint(1000, 2000, (150,)), source, torch.randint(2, (150,))))
    ours, theirs = drawn.clone(), drawn.clone()
    write_drafts_triton(packed, made, ours)
    write_drafts_torch(packed, made, theirs)
    assert torch.equal(ours, theirs)
    assert (ours == 7).sum() == 50


def test_drafts_that_only_the_device_knows_are_pinned_there() -> None:
    inputs = [checked(1, 0, 0, future_drafts=1), checked(1, 7), checked(1, 0, 0, 0, future_drafts=0)]
    tokens = tokens_of(inputs, [(row, DRAW) for row in range(9)], 1, 1, 3)
    assert tokens == [23, 24 ^ 1, 1002, 7, 1004, 20, 21, 22, 1008]


def test_a_step_without_drafts_is_left_alone() -> None:
    assert tokens_of([SequenceInput([1], 5, range(9), 4, 4)], [(0, DRAW)]) == [1000]


def test_answers_have_all_their_tokens_and_the_next_turn_finds_them() -> None:
    built = small_engine(MODEL, speculation=MTP_DRAFTS, cache_bytes=4 * ROOMY)
    PinnedDrafts(built.engine._runner)
    asked = [request(random_prompt(40 + i, seed=i), ANSWER) for i in range(4)]
    runs = together(built, asked)
    assert [len(run.tokens) for run in runs] == [ANSWER.max_tokens] * 4
    num_steps = 4 * (ANSWER.max_tokens - 1) - num_drafted(built)[1]
    assert 4 * (ANSWER.max_tokens - 1) / num_steps == pytest.approx(tokens_a_step(3), rel=0.05)
    again = [request([*text(*each), *random_prompt(20)], ANSWER) for each in zip(asked, runs, strict=True)]
    for asked_again, run in zip(again, together(built, again), strict=True):
        assert len(run.tokens) == ANSWER.max_tokens
        (admitted,) = (event for event in run.events if isinstance(event, Admitted))
        assert admitted.reused_tokens >= len(asked_again.tokens) - 20 - 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="passes of the layer are captured there")
def test_drafts_made_ahead_are_as_often_right() -> None:
    built = small_engine(MODEL, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=True, max_running=4)
    capture_layer(built.engine._runner, 4, 256)
    PinnedDrafts(built.engine._runner)
    (run,) = together(built, [request(random_prompt(40), replace(ANSWER, max_tokens=52))])
    assert len(run.tokens) == 52
    assert 51 / (51 - num_drafted(built)[1]) == pytest.approx(tokens_a_step(3), rel=0.1)
