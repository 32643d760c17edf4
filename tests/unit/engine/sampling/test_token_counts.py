"""Rows of token counts: what they hold, when they are made, and when they are free again."""

from dataclasses import replace

import pytest
import torch

from headrace.engine.build import BuiltEngine
from headrace.engine.sampling.token_counts import TokenCounts
from headrace.kernels.sampling.argmax import NO_TOKEN
from tests.support.engine.driving import GREEDY, engine_of, generate, request, run_all, serve, small_engine, submit
from tests.support.engine.oracle import random_prompt

VOCAB = 10
PENALISED = replace(GREEDY, max_tokens=40, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1)


class Unreadable(list[int]):
    """Tokens that nobody may look at."""

    def __iter__(self):
        raise AssertionError("the tokens were read again")


def counts_of(vocab: int = VOCAB) -> TokenCounts:
    return TokenCounts(vocab, torch.device("cpu"))


def test_a_row_tells_prompt_and_answer_apart_and_counts_the_answer() -> None:
    counts = counts_of()
    row = counts.row("a", [1, 1, 2, 2, 3, 3, 3], num_prompt_tokens=3)
    assert counts.values[row].tolist() == [0, 1, 3, 6, 0, 0, 0, 0, 0, 0]


def test_a_row_is_made_once_and_then_advanced_without_its_tokens() -> None:
    counts = counts_of()
    row = counts.row("a", [1, 2], 1)
    counts.advance(torch.tensor([row]), torch.tensor([9]))
    assert counts.row("a", Unreadable([1, 2, 9]), 1) == row
    assert counts.values[row].tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 2]


def test_no_token_is_counted_in_no_other_row() -> None:
    counts = counts_of()
    before, row = counts.row("a", [1, 2], 1), counts.row("b", [1, 2], 1)
    counts.advance(torch.tensor([row]), torch.tensor([NO_TOKEN]))
    assert counts.values[before].tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert counts.values[row].tolist() == [2, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    drafted = counts.row_after("b", [5, NO_TOKEN])
    assert counts.values[drafted].tolist() == [4, 1, 2, 0, 0, 2, 0, 0, 0, 0]


def test_memory_grows_with_the_most_rows_at_a_time_and_keeps_what_they_hold() -> None:
    counts = counts_of()
    rows = [counts.row(owner, [owner], 1) for owner in range(5)]
    assert len(set(rows)) == 5 and len(counts.values) == 8
    assert [counts.values[row].nonzero().flatten().tolist() for row in rows] == [[0], [1], [2], [3], [4]]
    for owner in range(5, 1000):
        counts.keep_only(range(owner - 4, owner))
        counts.row(owner, [owner % VOCAB], 1)
        assert counts.num_rows == 5
    assert len(counts.values) == 8


def test_a_row_that_is_used_again_forgets_its_former_owner() -> None:
    counts = counts_of()
    row = counts.row("a", [1, 2, 3], 0)
    counts.keep_only(["b"])
    assert counts.num_rows == 0
    assert counts.row("b", [4], 1) == row
    assert counts.values[row].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


def reference(path, prompt: list[int], sampling=PENALISED) -> list[int]:
    return generate(small_engine(path), request(prompt, sampling)).tokens


def test_penalised_requests_overlap_and_answer_the_same(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    expected = [reference(path, random_prompt(length)) for length in (5, 40)]
    plain = generate(small_engine(path), request(random_prompt(5), replace(PENALISED, repetition_penalty=1.0)))
    assert plain.tokens != expected[0], "the penalties change nothing"
    built = small_engine(path, overlap=True)
    runs = [submit(built, request(random_prompt(length), PENALISED)) for length in (5, 40)]
    assert num_overlapped(built) > 35
    assert [run.tokens for run in runs] == expected


def num_overlapped(built: BuiltEngine) -> int:
    """Runs until idle; how often a step was launched before the tokens of the one before it were known."""
    unknown: list[int] = []
    runner = built.engine._runner
    launch = runner.launch

    def counted(inputs, *rest):
        unknown.append(sum(entry.future_token is not None for entry in inputs))
        return launch(inputs, *rest)

    runner.launch = counted
    run_all(built)
    return sum(map(bool, unknown))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_penalised_request_answers_as_alone(overlap: bool, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    prompts = [random_prompt(20, seed) for seed in (1, 2)]
    expected = [reference(path, prompt) for prompt in prompts]
    built = engine_of(path, num_blocks=7, num_slots=8, overlap=overlap)
    runs = [submit(built, request(prompt, PENALISED)) for prompt in prompts]
    serve(built, *runs)
    assert built.engine.preemptions > 0
    assert [run.tokens for run in runs] == expected


def test_a_migrated_penalised_request_goes_on_as_if_it_had_stayed(tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(30)
    whole = reference(path, prompt)
    moved = replace(request([*prompt, *whole[:15]], PENALISED), num_prompt_tokens=len(prompt))
    assert generate(small_engine(path, overlap=True), moved, max_new=25).tokens == whole[15:]


def test_rows_of_requests_that_are_over_or_cancelled_come_back(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    counts = built.engine._runner.token_counts
    runs = [submit(built, request(random_prompt(9, seed), PENALISED)) for seed in range(6)]
    for _ in range(8):
        built.engine.admit()
        built.engine.step()
    assert counts.num_rows == 6
    for run in runs[:3]:
        built.engine.release(run.sequence)
    run_all(built)
    generate(built, request(random_prompt(9)))
    assert counts.num_rows == 0 and len(counts.values) == 8


def test_a_request_without_penalties_has_no_row(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    generate(built, request(random_prompt(9), replace(GREEDY, min_tokens=4, ignore_eos=False)))
    assert len(built.engine._runner.token_counts.values) == 0
