"""What a step costs by its shape."""

import pytest

from headrace.step_costs import StepCosts, StepShape

COSTS = StepCosts(step_s=1.0, decode_s=10.0, context_s=100.0, chunk_s=2.0, token_s=20.0, depth_s=200.0)


def test_a_step_costs_what_its_parts_cost():
    decoding = StepShape(num_decoding=2, context_tokens=7)
    prompt = StepShape.prefill(3, 5)
    assert COSTS.seconds(decoding) == 1 + 2 * 10 + 7 * 100
    assert COSTS.seconds(prompt) == 2 + 2 * 20 + (3 + 4) * 200
    assert COSTS.seconds(decoding + prompt) == COSTS.seconds(decoding) + COSTS.seconds(prompt)
    assert COSTS.seconds(StepShape()) == 0


def test_chunks_of_a_prompt_cost_their_tokens_once_and_a_step_each():
    whole = COSTS.prefill_s(0, 10, chunk_tokens=10)
    assert COSTS.prefill_s(0, 10, chunk_tokens=4) == pytest.approx(whole + 2 * COSTS.chunk_s)
    assert COSTS.prefill_s(0, 4, chunk_tokens=4) + COSTS.prefill_s(4, 10, chunk_tokens=6) == pytest.approx(
        whole + COSTS.chunk_s
    )
    assert COSTS.prefill_s(5, 5, chunk_tokens=4) == 0


def test_a_line_of_prompts_takes_its_steps_and_what_decodes_in_them():
    decoding, prompts = StepShape(num_decoding=3, context_tokens=50), StepShape.prefill(0, 10)
    steps_s = 3 * COSTS.decode_part_s(decoding)
    assert COSTS.line_s(prompts, decoding, chunk_tokens=4) == COSTS.prefill_s(0, 10, chunk_tokens=4) + steps_s
    assert COSTS.line_s(prompts, StepShape(), chunk_tokens=4) == COSTS.prefill_s(0, 10, chunk_tokens=4)
    assert COSTS.line_s(StepShape(), decoding, chunk_tokens=4) == 0
