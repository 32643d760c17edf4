"""Whatever NIXL's processes do, the benchmark gets its rows or the reason why not, in time. Stand-ins for NIXL."""

import os
import time

import pytest

from benchmarks.transfer.nixl import NixlFailed, Row, Stage, between_processes

ROW = Row("1", 0.5, 64)


def holds(told, peer):
    told.send(Stage("hold"))
    peer.send("metadata")
    time.sleep(60)


def writes(told, peer):
    assert peer.recv() == "metadata"
    told.send(ROW)


def fails(told, peer):
    told.send(Stage("load it"))
    raise RuntimeError("not found")


def crashes(told, peer):
    told.send(Stage("post it"))
    os.abort()


def hangs(told, peer):
    told.send(ROW)
    told.send(Stage("post it"))
    time.sleep(60)


def test_rows_come_and_both_processes_end():
    assert list(between_processes(holds, writes, 20.0)) == [ROW]


@pytest.mark.parametrize(
    ("hold", "write", "within_s", "rows", "why"),
    [
        (holds, fails, 20.0, [], r"the writer failed at: load it; RuntimeError\('not found'\) in fails"),
        (fails, hangs, 20.0, None, r"the passive end failed at: load it"),
        (holds, crashes, 20.0, [], r"the writer died at: post it; status -6"),
        (holds, hangs, 15.0, [ROW], r"no answer in time; the passive end is at: hold, the writer is at: post it"),
    ],
)
def test_what_goes_wrong_is_said_in_time(hold, write, within_s, rows, why):
    began_s, got = time.monotonic(), []
    with pytest.raises(NixlFailed, match=why):
        for row in between_processes(hold, write, within_s):
            got.append(row)
    assert time.monotonic() - began_s < within_s + 2
    assert rows is None or got == rows
