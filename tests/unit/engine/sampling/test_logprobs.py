"""Logprobs of a step's rows: their values, and how many rows' logits there are at a time."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.engine.sampling.logprobs import (
    LOGITS_BYTES,
    MOST_NUMBERS,
    PendingLogprobs,
    PromptScores,
    log_sum_exp,
    rows_at_once,
)
from headrace.engine.sequence import Scored
from headrace.request import PromptLogprobs, Sampling
from tests.support.engine.driving import Run, request, run_all, small_engine, submit
from tests.support.engine.oracle import random_prompt

VOCAB = 50
SCORED = Sampling(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=20)


def logits(rows: int, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def test_values_are_those_of_a_softmax_in_float64() -> None:
    lines, targets = logits(7), [3, 1, 4, 1, 5, 9, 2]
    pending = PendingLogprobs(lines, torch.tensor(targets), 3)
    expected = torch.log_softmax(lines.double(), -1)
    best = expected.topk(3)
    part = pending.part(start=11)
    assert part.logprobs == pytest.approx([float(expected[i, t]) for i, t in enumerate(targets)], abs=1e-6)
    assert part.top_ids == tuple(best.indices.flatten().tolist())
    assert part.top_logprobs == pytest.approx(best.values.flatten().tolist(), abs=1e-6)
    assert [part.of(i) for i in range(7)] == pending.rows([3] * 7)
    assert [len(each.top) for each in pending.rows([0, 1, 2, 3, 3, 2, 1])] == [0, 1, 2, 3, 3, 2, 1]


def test_a_sum_over_many_rows_takes_blocks_of_them() -> None:
    lines = logits(40, 200_000)
    torch.testing.assert_close(log_sum_exp(lines), torch.logsumexp(lines.double(), -1), atol=1e-7, rtol=0)


def test_a_token_that_cannot_come_has_minus_infinity_and_others_their_value() -> None:
    line = torch.full((1, VOCAB), -torch.inf)
    line[0, 4] = 1.0
    assert PendingLogprobs(line.expand(2, -1), torch.tensor([4, 5]), 0).part(1).logprobs == (0.0, -math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_has_no_logprob_and_its_neighbour_has(bad: float) -> None:
    lines = logits(2)
    lines[1, 7] = bad
    first, second = PendingLogprobs(lines, torch.tensor([1, 1]), 2).part(1).logprobs
    assert math.isfinite(first) and math.isnan(second)


@pytest.mark.parametrize("vocab", [1000, 151_936, 248_320, 10**9])
@pytest.mark.parametrize("num_top", [0, 20])
def test_rows_at_once_bound_the_logits_and_the_numbers_of_a_part(vocab: int, num_top: int) -> None:
    rows = rows_at_once(vocab, num_top)
    assert rows == 1 or (4 * vocab * rows <= LOGITS_BYTES and rows * (num_top + 1) <= MOST_NUMBERS)
    assert rows >= 1


def test_parts_come_in_the_order_in_which_they_were_added() -> None:
    scores = PromptScores()
    for start in (1, 3):
        scores.add(start, logits(2), [0, 0], 1)
    scores.add(5, logits(0), [], 1)
    assert [(part.start, part.end) for part in scores.parts()] == [(1, 3), (3, 5), (5, 5)]


class RecordingHead:
    """A model's head that notes how many rows it is asked for at a time."""

    def __init__(self, head) -> None:
        self._head = head
        self.num_rows: list[int] = []

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.num_rows.append(len(x))
        return self._head(x, out)


def test_a_long_scored_chunk_never_has_the_logits_of_all_its_rows(tiny_checkpoint) -> None:
    prompt = random_prompt(1000)
    built = small_engine(tiny_checkpoint("qwen35"), max_step_tokens=1024)
    head = RecordingHead(built.engine._runner.model.head)
    built.engine._runner.model = replace(built.engine._runner.model, head=head)
    run = submit(built, request(prompt, SCORED), prompt_logprobs=20)
    run_all(built)
    assert run.sequence.num_prefilled == 1000 and run.is_finished
    assert max(head.num_rows) == rows_at_once(built.engine._runner.model.config.vocab_size, 20) < 1000
    assert [part.start for part in parts(run)] == [1, *(part.end for part in parts(run)[:-1])]


def parts(run: Run) -> list[PromptLogprobs]:
    return [event.logprobs for event in run.events if isinstance(event, Scored)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_of_one_token_is_scored_as_an_empty_part(overlap: bool, max_tokens: int, tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=overlap)
    run = submit(built, request([5], replace(SCORED, max_tokens=max_tokens, ignore_eos=True)), prompt_logprobs=20)
    run_all(built)
    assert parts(run) == [PromptLogprobs(1, ())] and run.is_finished
    assert len(run.tokens) == max_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_all_scores_come_before_the_first_token_and_the_end(overlap: bool, max_tokens: int, tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=overlap, max_step_tokens=32)
    other = submit(built, request(random_prompt(40, 2)))
    run = submit(built, request(random_prompt(100), replace(SCORED, max_tokens=max_tokens)), prompt_logprobs=2)
    run_all(built)
    scored = [index for index, event in enumerate(run.events) if isinstance(event, Scored)]
    after = [index for index, event in enumerate(run.events) if type(event).__name__ in ("Sampled", "Finished")]
    assert len(scored) >= 3 and max(scored) < min(after)
    assert sum(len(part.logprobs) for part in parts(run)) == 99
    assert len(run.tokens) == max_tokens and other.is_finished
