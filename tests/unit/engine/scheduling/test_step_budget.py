import math

import pytest

from headrace.cache.checkpoints import ChunkSpan
from headrace.engine.scheduling.step_budget import StepBudget, TokenCost
from headrace.step_costs import StepCosts, StepShape

COST = TokenCost.in_tokens(1000)


def test_a_token_costs_twice_as_much_where_attention_costs_what_all_else_does() -> None:
    assert COST.of(ChunkSpan(0, 1)) == pytest.approx(1, rel=1e-3)
    assert COST.of(ChunkSpan(1000, 1001)) == pytest.approx(2, rel=1e-3)
    assert COST.of(ChunkSpan(30_000, 30_128)) == pytest.approx(128 * 31, rel=1e-2)


def test_a_prompt_costs_the_same_in_chunks_as_at_once() -> None:
    chunks = [COST.of(ChunkSpan(start, start + 100)) for start in range(0, 5000, 100)]
    assert sum(chunks) == pytest.approx(COST.of(ChunkSpan(0, 5000)))


@pytest.mark.parametrize("start", [0, 7, 1000, 30_000, 10_000_000])
@pytest.mark.parametrize("num_tokens", [1, 16, 500, 8192])
def test_as_many_tokens_fit_as_cost_so_much(start: int, num_tokens: int) -> None:
    cost = COST.of(ChunkSpan(start, start + num_tokens))
    assert COST.fitting(start, cost) == num_tokens


def test_without_attention_depth_costs_nothing() -> None:
    flat = TokenCost.in_tokens(math.inf)
    assert flat.of(ChunkSpan(1_000_000, 1_000_100)) == 100
    assert flat.fitting(1_000_000, 100) == 100


def test_what_costs_nothing_has_room_for_any_number() -> None:
    free = TokenCost(0.0, 0.0)
    assert free.fitting(100, 1.0) is None
    assert StepBudget(free, num_tokens=256, cost=0.0).fitting(100) == 256


def test_tokens_cost_seconds_as_measured() -> None:
    costs = StepCosts(token_s=10e-6, depth_s=1e-9)
    measured, span = TokenCost.in_seconds(costs), ChunkSpan(1000, 1500)
    assert measured.of(span) == pytest.approx(
        costs.prefill_part_s(StepShape.prefill(1000, 1500)) - costs.chunk_s, rel=1e-3
    )
    assert measured.fitting(1000, measured.of(span)) == 500


def test_no_token_costs_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        TokenCost(1.0, -1e-9)


@pytest.mark.parametrize("parity_depth", [0.0, -1.0, math.nan])
def test_a_depth_of_parity_that_is_none_is_refused(parity_depth: float) -> None:
    with pytest.raises(ValueError, match="parity_depth"):
        TokenCost.in_tokens(parity_depth)


def test_fewer_tokens_fit_the_deeper_they_are() -> None:
    budget = StepBudget(COST, num_tokens=256, cost=256)
    assert [budget.fitting(start) for start in (0, 1000, 10_000, 100_000)] == [229, 124, 23, 2]


def test_what_was_taken_is_gone() -> None:
    budget = StepBudget(COST, num_tokens=256, cost=300).without(ChunkSpan(1000, 1100))
    assert (budget.num_tokens, budget.cost) == (156, pytest.approx(95))
    assert StepBudget(COST, num_tokens=256, cost=10).without(ChunkSpan(1000, 1100)).fitting(0) == 0
    half = StepBudget(COST, num_tokens=9, cost=10).part(1 / 2)
    assert (half.num_tokens, half.cost) == (4, 5)
