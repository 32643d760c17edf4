"""NIXL's command may do anything: the benchmark gets its rows or the reason in time. Stand-ins for NIXL."""

import sys
import time

import pytest

from benchmarks.transfer.nixl import NixlFailed, Row, printed_rows

ROW = """print('row: {"pieces": "1", "seconds": 0.5, "num_bytes": 64}', flush=True)\n"""
STEP = "import os, time; print('load it', flush=True)\n"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_rows_are_read_as_they_are_printed() -> None:
    assert list(printed_rows(command(STEP + ROW), 60.0)) == [Row("1", 0.5, 64)]


@pytest.mark.parametrize(
    ("program", "within_s", "rows", "why"),
    [
        ("raise RuntimeError('not found')", 60.0, [], r"status 1; the last line: RuntimeError: not found"),
        ("os.abort()", 60.0, [], r"status -6; the last line: load it"),
        (ROW + "time.sleep(60)", 5.0, [Row("1", 0.5, 64)], r"status -9; the last line: load it"),
        (ROW + "os.fork() or time.sleep(60); time.sleep(60)", 5.0, None, r"status -9"),
    ],
    ids=["an error", "a crash", "a hang", "two processes that hang"],
)
def test_a_failure_is_reported_in_time(program: str, within_s: float, rows: list[Row] | None, why: str) -> None:
    began_s, got = time.monotonic(), []
    with pytest.raises(NixlFailed, match=why):
        for row in printed_rows(command(STEP + program), within_s):
            got.append(row)
    assert time.monotonic() - began_s < within_s + 30
    assert rows is None or got == rows
