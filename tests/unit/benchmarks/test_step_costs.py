"""The benchmark of predicted steps: a trial of it on the CPU."""

import pytest

from benchmarks.engine.step_costs import Observed, main
from headrace.step_costs import StepShape


def test_steps_are_told_apart_by_what_is_in_them() -> None:
    prompt, answer = StepShape.prefill(0, 16), StepShape(1, 10)
    assert [Observed(shape, 1.0, 1.0).kind for shape in (prompt, answer, prompt + answer)] == [
        "prompts",
        "answers",
        "both",
    ]


def test_a_trial_prints_all_costs_and_errors(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.engine.step_costs.UNCOUNTED_STEPS", 0)
    main(shape="tiny", device="cpu", seconds=0.5, token_gap_ms=50.0)
    printed = capsys.readouterr().out
    for name in ("step_s", "decode_s", "context_s", "chunk_s", "token_s", "depth_s", "| prompts |", "| all |"):
        assert name in printed
