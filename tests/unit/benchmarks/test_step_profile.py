"""The profile of a busy engine's steps: its clock, its records, and a trial of it on the CPU."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.engine.step_probe import PhaseClock, StepRecord, slowest_rows, step_shape
from benchmarks.engine.step_profile import TINY, loads_of, main
from headrace.engine.sampling.sampler import Drawn
from headrace.forward.sequence_input import SequenceInput
from headrace.step_costs import StepCosts, StepShape


def test_a_phase_does_not_count_what_runs_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    def work(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr("benchmarks.engine.step_probe.time", SimpleNamespace(perf_counter=lambda: now_s))
    clock = PhaseClock()
    inner = clock.timed("inner", lambda: work(2.0))
    clock.timed("outer", lambda: (inner(), work(0.5), inner()))()
    assert clock.take() == {"inner": 4.0, "outer": 0.5}
    assert clock.take() == {}


def test_the_shape_of_a_step_is_that_of_its_inputs() -> None:
    decode = SequenceInput((1,), 9, [0], 0, 0)
    chunk = SequenceInput([1] * 6, 4, [1], 1, 1)
    assert step_shape([decode, chunk, decode]) == StepShape(2, 20) + StepShape.prefill(4, 10)


def test_the_slowest_steps_are_those_that_exceed_their_contents_most() -> None:
    short = StepRecord(StepShape(1, 10), 0, 0, ["d1"], (0.0, 0.0), device_s=0.012)
    long = replace(short, shape=StepShape.prefill(0, 2048), num_prefills=1, num_writes=2, passes=["p2048"])
    long.device_s = 0.024
    (row,) = slowest_rows("load", [long, short], StepCosts(), 1)
    assert "| 12.00 |" in row and "| 1: d1 |" in row
    assert str(long) == "0 + 2048 in 1 (2): p2048"


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """The profile excludes what a start leaves from collections, as nodes do; other tests are to see it again."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_the_profile_runs_on_a_cpu_and_leaves_the_engine_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Drawn.tokens
    main(shape="tiny", device="cpu", only="4 short at once", seconds=0.3, slowest=1)
    printed = capsys.readouterr().out
    assert "| host ms a step, p50 / p99 |" in printed and "24 short at once" in printed
    assert Drawn.tokens is tokens
    assert "24 short at once" in loads_of(TINY)
