"""Step costs fitted to steps: near the truth whatever has been seen, and never at the mercy of one bad step."""

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.scheduling.cost_fit import CostFit
from headrace.step_costs import StepCosts, StepShape

DEFAULT = StepCosts()
SLOW = StepCosts(step_s=8e-3, decode_s=3e-4, context_s=1e-8, chunk_s=5e-3, token_s=2e-4, depth_s=1e-9)


def steps(dice: random.Random, num_steps: int, kinds: str = "dpm") -> list[StepShape]:
    """Steps that decode, prefill, or mix both."""
    return [step(dice, dice.choice(kinds)) for _ in range(num_steps)]


def step(dice: random.Random, kind: str) -> StepShape:
    shape = StepShape()
    if kind in "dm":
        num_decoding = dice.randint(1, 64)
        shape += StepShape(num_decoding, num_decoding * dice.randint(100, 30_000))
    if kind in "pm":
        start = dice.randint(0, 30_000)
        shape += StepShape.prefill(start, start + dice.randint(1, 1024))
    return shape


def errors(costs: StepCosts, truth: StepCosts, shapes: list[StepShape]) -> list[float]:
    """Relative errors of the predicted steps, ascending."""
    return sorted(abs(costs.seconds(shape) / truth.seconds(shape) - 1) for shape in shapes)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(
    "truth",
    [DEFAULT, SLOW, StepCosts(1e-3, 0, 0, 1e-3, 1e-5, 0), StepCosts(0, 1e-3, 0, 0, 1e-4, 1e-8)],
    ids=["a GPU", "a CPU", "no context", "no fixed part"],
)
def test_noisy_steps_of_all_kinds_show_what_steps_cost(truth: StepCosts, noise: float) -> None:
    dice, fit = random.Random(0), CostFit()
    for shape in steps(dice, 400):
        outlier = 30 if dice.random() < 0.02 else 1
        fit.observe(shape, truth.seconds(shape) * dice.lognormvariate(0, noise) * outlier)
    found = errors(fit.costs, truth, steps(random.Random(1), 200))
    assert found[100] < 0.01 + 0.25 * noise and found[190] < 0.03 + noise
    assert min(astuple(fit.costs)) >= 0


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
@settings(max_examples=20, deadline=None)
def test_no_cost_is_ever_negative_or_infinite(observed: list[tuple[int, float]]) -> None:
    fit = CostFit()
    for seed, seconds in observed:
        fit.observe(step(random.Random(seed), "dpm"[seed % 3]), seconds)
        assert all(0 <= cost < 1e9 for cost in astuple(fit.costs))


def test_before_any_step_the_costs_are_the_prior() -> None:
    fit = CostFit(SLOW)
    fit.observe(StepShape(), 1.0)
    fit.observe(StepShape(1, 10), 0.0)
    assert fit.costs == SLOW


def test_the_first_step_scales_all_costs() -> None:
    fit = CostFit()
    shape = StepShape.prefill(0, 1024)
    fit.observe(shape, 10 * DEFAULT.seconds(shape))
    assert astuple(fit.costs) == pytest.approx([10 * cost for cost in astuple(DEFAULT)])


def test_a_node_that_never_decodes_expects_decoding_to_be_as_much_slower_as_its_prompts() -> None:
    dice, fit = random.Random(0), CostFit()
    truth = StepCosts(*(5 * cost for cost in astuple(DEFAULT)))
    for shape in steps(dice, 300, "p"):
        fit.observe(shape, truth.seconds(shape) * dice.lognormvariate(0, 0.05))
    assert errors(fit.costs, truth, steps(dice, 100, "dpm"))[-1] < 0.1


def test_rare_prompts_are_remembered_over_many_decodes() -> None:
    dice, fit = random.Random(0), CostFit()
    for shape in [*steps(dice, 50, "m"), *steps(dice, 5_000, "d")]:
        fit.observe(shape, SLOW.seconds(shape))
    assert errors(fit.costs, SLOW, steps(dice, 100, "m"))[95] < 0.05


def test_one_sort_of_batch_says_nothing_wild_of_others() -> None:
    """Sixteen sequences of one length: step, sequences and context cannot be told apart."""
    dice, fit = random.Random(0), CostFit()
    for _ in range(1_000):
        shape = StepShape(16, 16 * dice.randint(1_900, 2_100))
        fit.observe(shape, DEFAULT.seconds(shape) * dice.lognormvariate(0, 0.1))
    assert errors(fit.costs, DEFAULT, steps(dice, 200, "d"))[190] < 0.25


@pytest.mark.parametrize("factor", [5, 100])
def test_a_first_launch_that_takes_far_longer_is_mended_by_the_next_steps(factor: float) -> None:
    dice, fit = random.Random(0), CostFit()
    first, *others = steps(dice, 40, "d")
    fit.observe(first, factor * DEFAULT.seconds(first))
    for shape in others:
        fit.observe(shape, DEFAULT.seconds(shape))
    assert errors(fit.costs, DEFAULT, steps(dice, 50, "d"))[40] < 0.1


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 10])
def test_a_machine_that_has_changed_is_known_anew_within_a_hundred_steps(factor: float) -> None:
    dice, fit = random.Random(0), CostFit()
    for shape in steps(dice, 1_000):
        fit.observe(shape, DEFAULT.seconds(shape))
    changed = StepCosts(*(factor * cost for cost in astuple(DEFAULT)))
    for shape in steps(dice, 100):
        fit.observe(shape, changed.seconds(shape))
    assert errors(fit.costs, changed, steps(dice, 100))[50] < 0.2


def test_one_suspension_of_the_host_changes_next_to_nothing() -> None:
    dice, fit = random.Random(0), CostFit()
    for shape in steps(dice, 300):
        fit.observe(shape, DEFAULT.seconds(shape))
    fit.observe(StepShape(16, 30_000), 60.0)
    for shape in steps(dice, 16):
        fit.observe(shape, DEFAULT.seconds(shape))
    assert errors(fit.costs, DEFAULT, steps(dice, 100))[-1] < 0.03


def test_nearly_all_steps_with_prompts_are_late_by_so_much_at_most() -> None:
    dice, fit, late = random.Random(0), CostFit(), 0
    for number, shape in enumerate(steps(dice, 12_000, "m")):
        seconds = DEFAULT.seconds(shape) * dice.lognormvariate(0, 0.08)
        if number >= 4_000:
            late += seconds > fit.costs.seconds(shape) + fit.costs.late_s
        fit.observe(shape, seconds)
    assert 0.04 < late / 8_000 < 0.06
    for shape in steps(dice, 3_000, "m"):
        fit.observe(shape, DEFAULT.seconds(shape))
    assert fit.costs.late_s < 0.03 * DEFAULT.seconds(shape)


def test_late_steps_of_drafts_alone_say_nothing_of_those_with_prompts() -> None:
    fit, shape = CostFit(), StepShape(16, 30_000) + StepShape.prefill(2_000, 2_003)
    for _ in range(100):
        fit.observe(shape, 2 * DEFAULT.seconds(shape), may_be_late=False)
    assert fit.costs.late_s == 0.0
