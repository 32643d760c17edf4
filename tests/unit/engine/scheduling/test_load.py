"""What an engine reports of its work, and what it learns from its steps."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ReceiveState
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.scheduling.load import EngineLoad
from headrace.step_costs import StepCosts, StepShape
from node_runtime.status import node_status
from tests.support.engine.driving import GREEDY, SMALL, engine_of, request, run_all, submit
from tests.support.engine.fake_device import FakeDevice, WaitedFor
from tests.support.engine.oracle import random_prompt

ONE = replace(GREEDY, max_tokens=1)


def engine(tiny_checkpoint) -> BuiltEngine:
    return engine_of(tiny_checkpoint("granite"), 70, 6, max_step_tokens=64)


def step(built: BuiltEngine) -> EngineLoad:
    built.engine.admit()
    built.engine.step()
    return built.engine.load


def test_prompts_wait_with_their_tokens_positions_and_lengths(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    submit(built, request(random_prompt(300), ONE))
    submit(built, request([9] * 100, ONE))
    whole = StepShape.prefill(0, 300) + StepShape.prefill(0, 100)
    lengths = (0,) * 6 + (100, 0, 300)
    assert built.engine.load == EngineLoad(0, 0, 400, whole.prefill_depths, lengths)
    assert built.engine.num_prompts == 2
    assert step(built).waiting_tokens == 400 - 64
    assert built.engine.num_prompts == 2
    run_all(built)
    assert built.engine.load == EngineLoad(0, 0, 0, 0, ())
    assert built.engine.num_prompts == 0


def test_what_generates_counts_with_its_context(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    first, second = submit(built, request(random_prompt(20))), submit(built, request(random_prompt(30, 1)))
    assert step(built) == EngineLoad(2, 20 + 1 + 30 + 1, 0, 0, ())
    assert step(built).context_tokens == 20 + 2 + 30 + 2
    built.engine.pause(second.sequence)
    assert built.engine.load == EngineLoad(1, 20 + 2, 0, 0, ())
    status = node_status(built)
    assert (status.num_decoding, status.context_tokens, status.waiting_lengths) == (1, 22, ())
    assert status.costs == built.engine.cost_fit.costs
    assert first.tokens


def test_a_prompt_whose_state_arrives_is_not_to_be_computed(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)

    def receive(hit: PrefixHit) -> HitPolicy:
        return ReceiveState()

    def fetch(hit: PrefixHit) -> HitPolicy:
        return FetchState(160)

    received = submit(built, request(random_prompt(200)), hit_policy=receive)
    fetched = submit(built, request(random_prompt(200, 1)), hit_policy=fetch)
    expected = EngineLoad(0, 0, 40, StepShape.prefill(160, 200).prefill_depths, (0,) * 5 + (40,))
    assert built.engine.load == expected
    built.engine.admit()
    assert built.engine.load == replace(expected, num_decoding=1, context_tokens=200)
    built.engine.prefill_locally(fetched.sequence)
    built.engine.prefill_locally(received.sequence)
    assert built.engine.load.waiting_tokens == 400, "nothing came: all is computed here"


TRUTH = StepCosts(step_s=0.02, decode_s=0.003, context_s=1e-6, chunk_s=0.01, token_s=2e-4, depth_s=5e-8)


def engine_on(device: FakeDevice, path: Path, *, overlap: bool, max_step_tokens: int) -> BuiltEngine:
    config = replace(SMALL, max_step_tokens=max_step_tokens, overlap=overlap)
    built = build_engine(str(path), config, device.clock)
    device.compute_for(built)
    return built


def test_a_step_behind_prompts_alone_is_left_open_until_the_device_needs_it(tiny_checkpoint) -> None:
    device = FakeDevice(TRUTH, launch_s=lambda shape: 0.002)
    built = engine_on(device, tiny_checkpoint("granite"), overlap=True, max_step_tokens=64)
    engine, in_step = built.engine, TRUTH.seconds(StepShape.prefill(0, 64))
    assert engine.spare_s == 0.0, "the device has nothing to do"
    serve_some(built, random.Random(0))  # learns what steps cost
    submit(built, request(random_prompt(64, 100), ONE))
    submit(built, request(random_prompt(64, 101), ONE))
    began_s = device.now_s
    step(built)
    at_first = engine.spare_s
    assert at_first == pytest.approx(in_step - 0.002 - 2 * 0.002, rel=0.15)
    device.now_s += at_first / 2
    assert engine.spare_s == pytest.approx(at_first / 2)
    device.now_s += at_first / 2 + 1e-6
    assert engine.spare_s == 0.0
    assert device.now_s < began_s + in_step
    step(built)
    device.now_s += 10.0
    assert engine.spare_s == 0.0, "the device is done"
    run_all(built)


def test_a_device_that_fails_while_a_step_is_open_is_blamed_on_what_it_computed(tiny_checkpoint, monkeypatch) -> None:
    built = engine_on(FakeDevice(TRUTH), tiny_checkpoint("granite"), overlap=True, max_step_tokens=64)
    computed = submit(built, request(random_prompt(64), ONE))
    step(built)
    submit(built, request(random_prompt(64, 1), ONE))

    def fail(drawn: WaitedFor) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(WaitedFor, "has_arrived", property(fail))
    with pytest.raises(RuntimeError, match="illegal"):
        _ = built.engine.spare_s
    assert built.engine.suspects == {computed.sequence}


def test_no_step_is_left_open_before_one_that_decodes(tiny_checkpoint) -> None:
    built = engine_on(FakeDevice(TRUTH), tiny_checkpoint("granite"), overlap=True, max_step_tokens=64)
    answer = submit(built, request(random_prompt(20)))
    step(built)
    step(built)
    built.engine.pause(answer.sequence)
    submit(built, request(random_prompt(200, 1), ONE))
    step(built)
    assert built.engine.spare_s > 0, "the answer does not go on"
    built.engine.unpause(answer.sequence)
    assert built.engine.spare_s == 0.0
    run_all(built)


def test_no_step_is_left_open_behind_one_that_decodes(tiny_checkpoint) -> None:
    built = engine_on(FakeDevice(TRUTH), tiny_checkpoint("granite"), overlap=True, max_step_tokens=64)
    submit(built, request(random_prompt(20)))
    step(built)
    step(built)
    submit(built, request(random_prompt(200, 1)))
    assert step(built).num_decoding == 1
    assert built.engine.spare_s == 0.0


def serve_some(built: BuiltEngine, dice: random.Random) -> None:
    for i in range(14):
        submit(built, request(random_prompt(dice.randint(40, 400), i)), admit_by_s=math.inf)
        for _ in range(dice.randint(1, 8)):
            step(built)
    run_all(built)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_learns_what_its_steps_cost(overlap: bool, tiny_checkpoint) -> None:
    built = engine_on(FakeDevice(TRUTH), tiny_checkpoint("granite"), overlap=overlap, max_step_tokens=64)
    serve_some(built, random.Random(0))
    costs = built.engine.cost_fit.costs
    for shape in (
        StepShape(1, 100),
        StepShape(8, 8 * 300),
        StepShape.prefill(0, 64),
        StepShape.prefill(300, 364),
        StepShape(6, 6 * 200) + StepShape.prefill(128, 160),
    ):
        assert costs.seconds(shape) == pytest.approx(TRUTH.seconds(shape), rel=0.1)


def test_a_step_whose_end_the_host_notes_late_takes_as_long_as_on_the_device(tiny_checkpoint) -> None:
    """Launching a prompt takes longer than the decode before it; then less is left of the prompt's own time."""
    device = FakeDevice(TRUTH, launch_s=lambda shape: 0.04 if shape.prefill_tokens else 0.0)
    built = engine_on(device, tiny_checkpoint("granite"), overlap=True, max_step_tokens=64)
    observed: list[tuple[StepShape, float]] = []
    built.engine.cost_fit.observe = lambda shape, seconds, **kind: observed.append((shape, seconds))
    serve_some(built, random.Random(0))
    mixed = [(shape, seconds) for shape, seconds in observed if shape.num_decoding and shape.prefill_tokens]
    assert [seconds for _, seconds in mixed] == pytest.approx([TRUTH.seconds(shape) for shape, _ in mixed], rel=0.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_stays_within_the_gap_that_an_answer_beside_it_asks_for(overlap: bool, tiny_checkpoint) -> None:
    gap_s = 0.08
    device = FakeDevice(TRUTH)
    built = engine_on(device, tiny_checkpoint("granite"), overlap=overlap, max_step_tokens=512)
    serve_some(built, random.Random(0))

    def longest_mixed_s(token_gap_s: float | None) -> float:
        asked = replace(request(random_prompt(100, 90), replace(GREEDY, max_tokens=40)), token_gap_s=token_gap_s)
        answer = submit(built, asked, admit_by_s=math.inf)
        while not answer.tokens:
            step(built)
        device.steps.clear()
        submit(built, request(random_prompt(1500, int(1e3 * (token_gap_s or 0))), ONE), admit_by_s=math.inf)
        run_all(built)
        return max(seconds for shape, seconds in device.steps if shape.num_decoding and shape.prefill_tokens)

    assert longest_mixed_s(None) > gap_s
    assert 0.7 * gap_s < longest_mixed_s(gap_s) <= gap_s
