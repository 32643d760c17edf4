"""The figure of goodput over load."""

from pathlib import Path

import pytest

from benchmarks.router.plot import plot
from benchmarks.router.report import Percentiles, Result

NONE = Percentiles.of(())


def result(*goodput: float) -> Result:
    return Result(1, 0, 1.0, 0.0, 1.0, NONE, NONE, NONE, NONE, NONE, NONE, NONE, goodput, {}, 1.0, 1.0)


def test_runs_of_several_rows_and_speeds_in_any_order_make_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        (row, policy, speed, result(0.5, 0.6, 1.0 / speed))
        for row in ("8", "4P4D")
        for policy in ("predicted", "round_robin")
        for speed in (20.0, 4.0)
    ]
    plot(tmp_path / "new" / "goodput.png", runs)
    assert (tmp_path / "new" / "goodput.png").read_bytes().startswith(b"\x89PNG")
