"""Biases: what their rows hold, when they are made, and what they do to answers."""

from dataclasses import replace

import pytest
import torch

from headrace.engine.sampling.token_biases import TokenBiases
from headrace.request import BadWord, Sampling
from headrace.wire.codecs import decode, encode
from headrace.wire.generated import headrace_pb2 as pb
from tests.support.engine.driving import GREEDY, engine_of, generate, request, run_all, serve, small_engine, submit
from tests.support.engine.oracle import random_prompt

INF = float("inf")
VOCAB = 6


def biases() -> TokenBiases:
    return TokenBiases(VOCAB, torch.device("cpu"))


def test_a_row_holds_biases_and_shuts_out_what_may_not_come() -> None:
    rows = biases()
    some = replace(GREEDY, bias_ids=(1, 4), bias_values=(2.5, -100.0))
    row = rows.row("a", some)
    assert rows.values[row].tolist() == [0, 2.5, 0, 0, -100, 0]
    few = replace(some, allowed_token_ids=(1, 2, 3), bad_words=(BadWord((3,)), BadWord((1, 2))))
    row = rows.row("b", few)
    assert rows.values[row].tolist() == [-INF, 2.5, 0, -INF, -INF, -INF]


def test_a_row_is_filled_once() -> None:
    rows = biases()
    row = rows.row("a", replace(GREEDY, bias_ids=(1,), bias_values=(1.0,)))
    assert rows.row("a", GREEDY) == row and rows.values[row].tolist() == [0, 1, 0, 0, 0, 0]


def test_rows_are_added_to_their_logits_alone() -> None:
    rows, logits = biases(), torch.arange(18.0).view(3, VOCAB)
    row = rows.row("a", replace(GREEDY, bias_ids=(0,), bias_values=(-7.0,)))
    rows.add(logits, [1], [row])
    expected = torch.arange(18.0).view(3, VOCAB)
    expected[1, 0] -= 7
    assert torch.equal(logits, expected)


def test_sampling_with_biases_and_bad_words_comes_through_the_wire() -> None:
    sampling = replace(
        GREEDY,
        bias_ids=(3, 151935),
        bias_values=(-100.0, 0.1),
        allowed_token_ids=(1, 2),
        bad_words=(BadWord((4, 5)), BadWord((6,))),
    )
    assert decode(pb.Sampling.FromString(encode(sampling, pb.Sampling()).SerializeToString()), Sampling) == sampling


@pytest.mark.parametrize("overlap", [False, True])
def test_biases_steer_an_answer_beside_others_and_after_a_preemption_and_a_move(overlap, tiny_checkpoint) -> None:
    path, prompt, drawn = tiny_checkpoint("granite"), random_prompt(20), replace(GREEDY, max_tokens=40, temperature=1.0)
    free = generate(small_engine(path), request(prompt, drawn)).tokens
    allowed = tuple(range(40, 60))
    biased = replace(drawn, bias_ids=(free[0], 45), bias_values=(-100.0, 1.5), allowed_token_ids=(free[0], *allowed))
    expected = generate(small_engine(path), request(prompt, biased)).tokens
    assert set(expected) <= set(allowed) and len(set(expected)) > 1
    built = engine_of(path, num_blocks=6, num_slots=8, overlap=overlap)
    runs = [submit(built, request(prompt, sampling)) for sampling in (biased, drawn)]
    serve(built, *runs)
    assert built.engine.preemptions > 0
    assert [run.tokens for run in runs] == [expected, free]
    moved = replace(request([*prompt, *expected[:5]], biased), num_prompt_tokens=len(prompt))
    assert generate(small_engine(path, overlap=overlap), moved, max_new=35).tokens == expected[5:]


def test_a_bias_comes_before_penalties(tiny_checkpoint) -> None:
    """A token whose logit a bias makes positive is divided by the repetition penalty, not multiplied."""
    path, prompt = tiny_checkpoint("granite"), random_prompt(9)
    token = prompt[0]
    lifted = replace(GREEDY, bias_ids=(token,), bias_values=(100.0,))
    assert set(generate(small_engine(path), request(prompt, lifted)).tokens) == {token}
    damped = generate(small_engine(path), request(prompt, replace(lifted, repetition_penalty=10.0))).tokens
    assert set(damped) == {token}
    assert token not in generate(small_engine(path), request(prompt, replace(lifted, bias_values=(-100.0,)))).tokens


def test_rows_of_requests_that_are_over_come_back(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    rows = built.engine._runner.token_biases
    for seed in range(3):
        submit(built, request(random_prompt(9, seed), replace(GREEDY, bias_ids=(1,), bias_values=(1.0,))))
    run_all(built)
    generate(built, request(random_prompt(9)))
    assert rows.num_rows == 0 and len(rows.values) == 4
