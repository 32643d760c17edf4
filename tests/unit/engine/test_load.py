"""What an engine reports of its work, and what it learns from its steps."""

import random
import time
from dataclasses import dataclass, replace

import pytest

from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ReceiveState
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.load import EngineLoad
from headrace.engine.sampler import Drawn
from headrace.request import Token
from headrace.step_costs import StepCosts, StepShape
from node_runtime.status import node_status
from tests.support.engine.driving import GREEDY, SMALL, engine_of, request, run_all, submit
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
    assert step(built).waiting_tokens == 400 - 64
    run_all(built)
    assert built.engine.load == EngineLoad(0, 0, 0, 0, ())


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


class FakeDevice:
    """Computes each launched step as long as `truth` says, one after another; `now_s` is the host's clock."""

    def __init__(self, truth: StepCosts) -> None:
        self.now_s = 100.0
        self._truth = truth
        self._free_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def compute_for(self, built: BuiltEngine) -> None:
        launch = built.engine._runner.launch

        def launch_here(inputs, draws, scored=()):
            shape = StepShape()
            for each in inputs:
                end = each.start + len(each.tokens)
                shape += StepShape(1, end) if each.is_decode else StepShape.prefill(each.start, end)
            self._free_s = max(self._free_s, self.now_s) + self._truth.seconds(shape)
            launched = launch(inputs, draws, scored)
            return replace(launched, drawn=WaitedFor(launched.drawn, self, self._free_s))

        built.engine._runner.launch = launch_here


@dataclass
class WaitedFor:
    """Tokens that arrive when the device has computed them."""

    drawn: Drawn
    device: FakeDevice
    done_s: float

    def tokens(self) -> list[Token]:
        self.device.now_s = max(self.device.now_s, self.done_s)
        return self.drawn.tokens()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_learns_what_its_steps_cost(overlap: bool, tiny_checkpoint) -> None:
    truth = StepCosts(step_s=0.02, decode_s=0.003, context_s=1e-6, chunk_s=0.01, token_s=2e-4, depth_s=5e-8)
    device = FakeDevice(truth)
    config = replace(SMALL, max_step_tokens=64, overlap=overlap)
    built = build_engine(str(tiny_checkpoint("granite")), config, device.clock)
    device.compute_for(built)
    dice = random.Random(0)
    for i in range(14):
        submit(built, request(random_prompt(dice.randint(40, 400), i)), admit_by_s=time.monotonic() + 1e6)
        for _ in range(dice.randint(1, 8)):
            built.engine.admit()
            built.engine.step()
    run_all(built)
    costs = built.engine.cost_fit.costs
    for shape in (
        StepShape(1, 100),
        StepShape(8, 8 * 300),
        StepShape.prefill(0, 64),
        StepShape.prefill(300, 364),
        StepShape(6, 6 * 200) + StepShape.prefill(128, 160),
    ):
        assert costs.seconds(shape) == pytest.approx(truth.seconds(shape), rel=0.1)
