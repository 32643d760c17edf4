"""A device whose steps take a known time, under a real engine of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.engine.build import BuiltEngine
from headrace.engine.sampler import Drawn
from headrace.request import Token
from headrace.step_costs import StepCosts, StepShape


class FakeDevice:
    """Computes each launched step as long as `truth` says, one after another; `now_s` is the host's clock.

    steps     the contents of those computed so far, with their seconds
    launch_s  the host's time to launch one, in which the device computes
    """

    def __init__(self, truth: StepCosts, launch_s: Callable[[StepShape], float] = lambda shape: 0.0) -> None:
        self.launch_s = launch_s
        self.now_s = 100.0
        self._truth = truth
        self._free_s = 0.0
        self.steps: list[tuple[StepShape, float]] = []

    def clock(self) -> float:
        return self.now_s

    def compute_for(self, built: BuiltEngine) -> None:
        launch = built.engine._runner.launch

        def launch_here(inputs, draws, *rest):
            shape = StepShape()
            for each in inputs:
                end = each.start + len(each.tokens)
                shape += StepShape(1, end) if each.is_decode else StepShape.prefill(each.start, end)
            self.steps.append((shape, self._truth.seconds(shape)))
            self._free_s = max(self._free_s, self.now_s) + self._truth.seconds(shape)
            self.now_s += self.launch_s(shape)
            launched = launch(inputs, draws, *rest)
            return replace(launched, drawn=WaitedFor(launched.drawn, self, self._free_s))

        built.engine._runner.launch = launch_here


@dataclass
class WaitedFor:
    """Tokens that arrive when the device has computed them."""

    drawn: Drawn
    device: FakeDevice
    done_s: float

    def ids(self) -> list[int]:
        self.device.now_s = max(self.device.now_s, self.done_s)
        return self.drawn.ids()

    def tokens(self, draws: slice) -> list[Token]:
        return self.drawn.tokens(draws)

    @property
    def has_arrived(self) -> bool:
        return self.device.now_s >= self.done_s

    def seconds_after(self, before: WaitedFor) -> float:
        return self.done_s - before.done_s
