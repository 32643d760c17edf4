"""Requests whose logits are NaN, as where activations overflow: each ends alone, and says why."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cache.hits import ReceiveState
from headrace.config import ConfigError
from headrace.engine.build import BuiltEngine
from headrace.engine.failures import NanLogits, UnprovenPrefix
from headrace.engine.runner import Launched
from headrace.engine.sequence import Failed, Finished, Scored
from headrace.engine.warm_up import warm_up
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.argmax import NO_TOKEN
from headrace.request import BadWord, Request, Sampling
from tests.support.engine.checkpoint_edits import edit_tensors
from tests.support.engine.drafters import ANSWER, KNOWN, MTP_DRAFTS, ROOMY, always_right, drafting_engine, num_drafted
from tests.support.engine.driving import GREEDY, Run, assert_nothing_in_use, generate, request, run_all, small_engine
from tests.support.engine.driving import submit as submitted
from tests.support.engine.interpreted import capture_layer
from tests.support.engine.oracle import random_prompt
from tests.support.node.engine_pair import move

RANDOM = replace(GREEDY, temperature=1.0, seed=5)
PENALISED = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.5)
WITH_LOGPROBS = replace(GREEDY, logprobs=3)


def unused(*texts: Sequence[int]) -> int:
    """A token that none of these has."""
    return next(token for token in range(5, 512) if not any(token in text for text in texts))


def break_token(built: BuiltEngine, token: int) -> None:
    """Whatever follows the token has logits of NaN. The head, packed on a CPU, has tensors of its own."""
    built.engine._runner.model.embedding[token] = torch.nan


def run_together(built: BuiltEngine, *asked: Request) -> list[Run]:
    runs = [submitted(built, each) for each in asked]
    run_all(built)
    for run in runs:
        built.engine.release(run.sequence)
    assert_nothing_in_use(built)
    return runs


def assert_failed(run: Run, num_tokens: int, kind: type[Exception] = NanLogits) -> None:
    """It ended for want of a token behind so many."""
    *_, last = run.events
    assert isinstance(last, Failed) and type(last.error) is kind
    assert str(last.error).startswith(f"the model's logits behind {num_tokens} tokens are not numbers (NaN)")
    assert not any(isinstance(event, Finished) for event in run.events)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["granite", "qwen35_moe"])
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, PENALISED, WITH_LOGPROBS], ids=lambda s: str(s.temperature))
def test_a_prompt_without_a_next_token_ends_alone(
    sampling: Sampling, family: str, overlap: bool, tiny_checkpoint
) -> None:
    path = tiny_checkpoint(family)
    others = [request(random_prompt(20), sampling), request(random_prompt(36), GREEDY)]
    alone = [generate(small_engine(path), each).tokens for each in others]
    built = small_engine(path, overlap=overlap)
    break_token(built, broken := unused(*alone, *(each.tokens for each in others)))
    first, failed, last = run_together(built, others[0], request([*random_prompt(25), broken], sampling), others[1])
    assert [first.tokens, last.tokens] == alone
    assert_failed(failed, 26)
    assert failed.tokens == [] and built.engine.nan_requests == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, {"speculation": MTP_DRAFTS, "cache_bytes": ROOMY}], ids=["plain", "mtp"])
def test_an_answer_keeps_the_tokens_before(settings: dict[str, Any], overlap: bool, trained: Path) -> None:
    """Where the layer drafts, it has no numbers there either."""
    other = request(random_prompt(20))
    alone = generate(small_engine(trained), other).tokens
    built = small_engine(trained, overlap=overlap, max_running=4, **settings)
    break_token(built, broken := unused(other.tokens, alone, random_prompt(25)))
    only_broken = replace(GREEDY, allowed_token_ids=(broken,))
    beside, failed = run_together(built, other, request(random_prompt(25), only_broken))
    assert_failed(failed, 26)
    assert failed.tokens == [broken] and beside.tokens == alone


def lose_draw(built: BuiltEngine, check: int, row: int) -> None:
    """The check with this number, of one sequence and three drafts, finds no token in one of its rows."""
    launch, num_checks = built.engine._runner.launch, 0

    def launch_and_lose(inputs: list[SequenceInput], *rest: Any) -> Launched:
        nonlocal num_checks
        launched = launch(inputs, *rest)
        num_checks += inputs[0].has_drafts
        if inputs[0].has_drafts and num_checks == check:
            ids = launched.drawn.ids
            launched.drawn.ids = lambda: [NO_TOKEN if n == row else token for n, token in enumerate(ids())]
        return launched

    built.engine._runner.launch = launch_and_lose


@pytest.mark.parametrize("row", [0, 2, 3])
def test_of_a_check_the_tokens_before_are_kept(row: int, tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20))
    answer = generate(small_engine(path), asked).tokens
    built = drafting_engine(path, always_right([*asked.tokens, *answer]))
    lose_draw(built, 2, row)
    [failed] = run_together(built, asked)
    kept = answer[: 5 + row]  # the prompt's token, four of the first check
    assert failed.tokens == kept
    assert_failed(failed, 20 + len(kept))
    assert num_drafted(built)[1] == 3 + max(0, row - 1)  # the first one behind known tokens is no draft
    assert generate(built, asked).tokens == answer, "what it left in the cache is right"


def test_of_a_check_that_comes_first_only_what_was_there_before_is_proven(tiny_checkpoint) -> None:
    """Behind a transfer: the first 16 of the 30 tokens are a block, and the check completes the next one."""
    path, asked = tiny_checkpoint("granite"), request(random_prompt(30))
    source = small_engine(path)
    answer = generate(source, asked).tokens
    here = submitted(source, asked, max_new=1)
    run_all(source)
    built = drafting_engine(path, always_right([*asked.tokens, *answer]))
    lose_draw(built, 1, 2)
    there = submitted(built, asked, hit_policy=lambda hit: ReceiveState())
    built.engine.admit()
    move(source, here, built, there)
    built.engine.run_decode(there.sequence, answer[0])
    run_all(built)
    assert there.tokens == answer[1:3]
    assert_failed(there, 33)
    assert built.engine.cache.match(there.sequence.keys, max_tokens=33).attention_tokens == 16


@pytest.mark.parametrize("row", [1, 2, 3])
def test_an_answer_that_ends_before_it_is_whole(row: int, tiny_checkpoint) -> None:
    path, asked = tiny_checkpoint("granite"), request(random_prompt(20))
    answer = generate(small_engine(path), asked).tokens
    assert answer.index(answer[5]) == 5
    built = drafting_engine(path, always_right([*asked.tokens, *answer]))
    lose_draw(built, 2, row)
    [whole] = run_together(built, request(random_prompt(20), replace(GREEDY, stop_token_ids=(answer[5],))))
    assert whole.tokens == answer[:6] and whole.is_finished and built.engine.nan_requests == 0


def test_a_check_behind_the_one_without_a_token_is_dropped(trained: Path) -> None:
    built = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=True, max_running=4)
    capture_layer(built.engine._runner, 4, 256)
    answer = generate(built, request(KNOWN, ANSWER)).tokens
    lose_draw(built, 2, 0)
    [failed] = run_together(built, request(KNOWN, ANSWER))
    assert failed.tokens == answer[: len(failed.tokens)] and len(failed.tokens) > 1
    assert_failed(failed, len(KNOWN) + len(failed.tokens))
    assert generate(built, request(KNOWN, ANSWER)).tokens == answer


@pytest.mark.parametrize("max_new", [0, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_scored_prompt_ends_with_the_parts_before(overlap: bool, max_new: int, tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(40)
    asked, other = request([*prompt, *prompt]), request(random_prompt(30, seed=3))
    alone = generate(small_engine(path), other).tokens
    built = small_engine(path, overlap=overlap, max_step_tokens=32)
    break_token(built, broken := unused(prompt, other.tokens, alone))
    scored = submitted(built, request([*asked.tokens, broken, 7]), max_new=max_new, prompt_logprobs=1)
    beside = submitted(built, other)
    run_all(built)
    assert_failed(scored, 82)
    parts = [event.logprobs for event in scored.events if isinstance(event, Scored)]
    assert 0 < sum(len(part.logprobs) for part in parts) < 81
    assert all(math.isfinite(logprob) for part in parts for logprob in part.logprobs)
    assert scored.tokens == [] and beside.tokens == alone and built.engine.nan_requests == 1


@pytest.fixture
def shared(tiny_checkpoint) -> tuple[BuiltEngine, Request, Request, list[int]]:
    """An engine with a token that breaks it, a prompt with that token behind a checkpoint of the same step, one that
    begins with what is before, and its answer."""
    path = tiny_checkpoint("granite")
    system = random_prompt(120)
    asked = request([*system, *random_prompt(20, seed=2)])
    answer = generate(small_engine(path), asked).tokens
    built = small_engine(path, max_step_tokens=64)
    break_token(built, broken := unused(asked.tokens, answer))
    return built, request([*system, broken, *system], boundaries=(112,)), asked, answer


def again(built: BuiltEngine, asked: Request, prompt_length: int) -> list[int]:
    """The tokens of a request that reused a prefix without numbers, which a second attempt does not find."""
    first = generate(built, asked)
    assert_failed(first, prompt_length, UnprovenPrefix)
    assert first.tokens == []
    return generate(built, asked).tokens


def test_a_prompt_that_a_client_cancels_costs_later_ones_an_attempt(shared) -> None:
    built, broken, asked, answer = shared
    cancelled = submitted(built, broken)
    for _ in range(3):  # the second chunk has the broken token, and blocks before it
        built.engine.admit()
        built.engine.step()
    assert cancelled.sequence.is_prefilling
    built.engine.release(cancelled.sequence)
    assert again(built, asked, 140) == answer
    assert generate(built, asked).tokens == answer, "and no more than one"
    assert_failed(generate(built, broken), 241)
    assert generate(built, asked).tokens == answer, "a token was drawn from what it has reused"


def test_a_prompt_that_shares_one_under_way_is_tried_again(shared) -> None:
    built, broken, asked, answer = shared
    failing, beside = submitted(built, broken), None
    while failing.sequence.is_prefilling or beside is None:
        built.engine.admit()
        built.engine.step()
        if beside is None and failing.sequence.num_computed >= 128:
            beside = submitted(built, asked)
    run_all(built)
    assert_failed(failing, 241)
    assert_failed(beside, 140, UnprovenPrefix)
    for run in failing, beside:
        built.engine.release(run.sequence)
    assert generate(built, asked).tokens == answer
    assert_nothing_in_use(built)


def test_a_prompt_of_which_nothing_is_drawn_proves_nothing(shared) -> None:
    built, broken, asked, answer = shared
    assert not any(isinstance(event, Failed) for event in generate(built, broken, max_new=0).events)
    assert again(built, asked, 140) == answer


BAD_WORDS = replace(GREEDY, bad_words=(BadWord((7, 9)), BadWord((7, 9, 11))))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside one that is drafted for ahead"])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, RANDOM, PENALISED, WITH_LOGPROBS, BAD_WORDS, replace(GREEDY, bias_ids=(7,), bias_values=(3.0,))],
    ids=["greedy", "random", "penalised", "logprobs", "bad words", "biased"],
)
def test_a_layer_without_numbers_drafts_nothing_that_is_right(
    sampling: Sampling, beside: bool, overlap: bool, trained: Path
) -> None:
    asked = [request(random_prompt(20), sampling), *([request(KNOWN, ANSWER)] * beside)]
    alone = [generate(small_engine(trained), each).tokens for each in asked]
    built = small_engine(trained, speculation=MTP_DRAFTS, cache_bytes=ROOMY, overlap=overlap, max_running=4)
    capture_layer(built.engine._runner, 4, 256)
    built.engine._runner.model.mtp.embedding_norm.fill_(torch.nan)
    assert [run.tokens for run in run_together(built, *asked)] == alone
    drafted, accepted = num_drafted(built)
    assert drafted > 0 and accepted == 0


def test_a_model_of_damaged_weights_does_not_start(tiny_checkpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("granite"), tmp_path / "damaged"))
    edit_tensors(path, lambda tensors: {name: each * torch.nan for name, each in tensors.items()})
    runner = small_engine(path).engine._runner
    with pytest.raises(ConfigError, match=r"logits are not numbers \(NaN\) in torch.float32.*engine.dtype"):
        warm_up(runner, max_step_tokens=64, max_running=4, max_tokens=64, graphs=False)
