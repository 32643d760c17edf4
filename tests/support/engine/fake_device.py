"""A device whose steps take a known time, under a real engine of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.engine.build import BuiltEngine
from headrace.engine.drafts.ahead import DraftsAhead
from headrace.engine.sampling.sampler import Drawn
from headrace.request import Token
from headrace.step_costs import StepCosts, StepShape


class FakeDevice:
    """Computes each launched step as long as `truth` says, one after another; `now_s` is the host's clock.

    steps     the contents of those computed so far, with their seconds
    launch_s  the host's time to launch one, in which the device computes
    make_s    the host's time before that
    pass_s    of each pass in which a model's layer drafts
    """

    def __init__(
        self,
        truth: StepCosts,
        launch_s: Callable[[StepShape], float] = lambda shape: 0.0,
        *,
        make_s: float = 0.0,
        pass_s: float = 0.0,
    ) -> None:
        self.launch_s = launch_s
        self._make_s = make_s
        self._pass_s = pass_s
        self.now_s = 100.0
        self._truth = truth
        self._free_s = 0.0
        self.steps: list[tuple[StepShape, float]] = []

    def clock(self) -> float:
        return self.now_s

    def compute_for(self, built: BuiltEngine) -> None:
        runner = built.engine._runner
        launch, draft_tokens, draft_ahead = runner.launch, runner.draft_tokens, runner.draft_ahead

        def launch_here(inputs, draws, *rest):
            shape = StepShape()
            for each in inputs:
                end = each.start + len(each.tokens)
                num_drafts = (len(each.tokens) - 1) or bool(each.behind)  # behind a check all have room for one
                is_single = each.is_decode or each.has_drafts
                shape += StepShape(1, end, num_drafts=num_drafts) if is_single else StepShape.prefill(each.start, end)
            self.steps.append((shape, self._truth.seconds(shape)))
            self.now_s += self._make_s
            self._compute(self._truth.seconds(shape))
            self.now_s += self.launch_s(shape)
            launched = launch(inputs, draws, *rest)
            return replace(launched, drawn=WaitedFor(launched.drawn, self, self._free_s))

        def draft_tokens_here(starts):
            self._compute(self._pass_s * max(start.num_drafts for start in starts))
            self.now_s = max(self.now_s, self._free_s)
            return draft_tokens(starts)

        def draft_ahead_here(starts, num_passes):
            made = draft_ahead(starts, num_passes)
            if made is not None:
                self._compute(self._pass_s * num_passes)
                made.arrived = Arrival(self, self._free_s)
            return made

        runner.launch, runner.draft_tokens, runner.draft_ahead = launch_here, draft_tokens_here, draft_ahead_here

    def _compute(self, seconds: float) -> None:
        self._free_s = max(self._free_s, self.now_s) + seconds


@dataclass
class Arrival:
    """An event of the device."""

    device: FakeDevice
    done_s: float

    def query(self) -> bool:
        return self.device.now_s >= self.done_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.done_s)


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

    def seconds_after(self, before: WaitedFor | DraftsAhead) -> float:
        if isinstance(before, WaitedFor):
            return self.done_s - before.done_s
        assert isinstance(before.arrived, Arrival)
        return self.done_s - before.arrived.done_s
