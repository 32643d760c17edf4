"""Checkpoints that the steps of a request publish."""

from dataclasses import replace

import pytest

from tests.support.engine.driving import GREEDY, generate, request, run_all, small_engine, submit
from tests.support.engine.oracle import greedy, random_prompt

BOUNDARIES = tuple(range(16, 300, 16))


@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_a_checkpoint_at_every_boundary_costs_no_further_step_and_each_can_be_resumed(family, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    built = small_engine(path, checkpoint_policy="every", max_step_tokens=256)
    prompt = random_prompt(300)
    run = submit(built, request(prompt, replace(GREEDY, max_tokens=1)))
    built.engine.admit()
    for _ in range(2):  # chunks of 256 and 44 tokens
        assert built.engine.step()
    assert not built.engine.step()
    assert run.sequence.all_checkpoints == BOUNDARIES
    assert built.engine.computed_tokens == 300
    built.engine.release(run.sequence)
    for boundary in BOUNDARIES[::3]:
        branched = [*prompt[:boundary], *random_prompt(5, seed=boundary)]
        resumed = generate(built, request(branched, replace(GREEDY, max_tokens=4)))
        assert resumed.sequence.num_prefilled == 5
        assert resumed.tokens == greedy(path, branched, 4)


def test_two_prompts_in_one_step_leave_all_their_checkpoints(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), checkpoint_policy="every")
    runs = [submit(built, request(random_prompt(100, seed), replace(GREEDY, max_tokens=1))) for seed in range(2)]
    built.engine.admit()
    assert built.engine.step()
    assert [run.sequence.all_checkpoints for run in runs] == [tuple(range(16, 100, 16))] * 2
    run_all(built)


def test_a_prompt_goes_on_without_checkpoints_for_which_there_is_no_slot(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path, checkpoint_policy="every")
    scarce = small_engine(path, checkpoint_policy="every", cache_bytes=1 << 20, state_share=0.25)
    assert scarce.sizes.num_slots < len(BOUNDARIES)
    asked = request(random_prompt(300))
    answer = generate(scarce, asked)
    assert 0 < len(answer.sequence.prompt_checkpoint_positions) < len(BOUNDARIES)
    assert answer.tokens == generate(built, asked).tokens
