"""The processes of a run: found, recognised and ended."""

import os
import shutil
import stat
import time

import pytest

from deploy.errors import FolderUnusable
from deploy.processes import (
    end_processes_of_run,
    is_alive,
    make_folders,
    processes_of_run,
    run_folder,
    started_at_s,
    wait_gone,
    working_folder,
)
from tests.support.deploy.run_processes import IGNORES_SIGTERM, NO_RUN, OBEYS, OTHER_RUN, OURS, RUN
from tests.support.patience import PATIENCE_S


def test_a_later_process_of_the_same_pid_is_not_the_supervisor(runs):
    assert is_alive(os.getpid(), started_at_s(os.getpid()))
    assert not is_alive(os.getpid(), started_at_s(os.getpid()) + 10)


def test_a_runs_folders_are_for_its_user_alone():
    working = make_folders(OURS)
    try:
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in (working, working.parent)] == [0o700, 0o700]
        assert working == working_folder(OURS)
    finally:
        shutil.rmtree(working.parent)


def test_processes_are_found_by_their_run_alone(spawn):
    one, other = spawn(OBEYS, RUN), spawn(OBEYS, OTHER_RUN)
    assert processes_of_run(RUN) == [one.pid]
    assert processes_of_run(OTHER_RUN) == [other.pid]
    assert processes_of_run(NO_RUN) == []


def test_what_is_left_at_the_deadline_is_killed(spawn):
    stubborn = spawn(IGNORES_SIGTERM, RUN)
    assert end_processes_of_run(RUN, time.monotonic() + 0.1) == [stubborn.pid]
    assert stubborn.wait(PATIENCE_S) == -9
    assert end_processes_of_run(RUN, time.monotonic()) == []


def test_waiting_for_a_process_has_a_deadline(spawn):
    process = spawn(OBEYS, RUN)
    started_s = started_at_s(process.pid)
    assert not wait_gone(process.pid, started_s, time.monotonic() + 0.1)
    process.kill()
    assert wait_gone(process.pid, started_s, time.monotonic() + PATIENCE_S)


def test_a_zombie_is_not_alive(spawn):
    process = spawn(OBEYS, RUN)
    assert is_alive(process.pid)
    process.kill()  # nobody has waited for it yet
    assert wait_gone(process.pid, time.time(), time.monotonic() + PATIENCE_S)
    assert not is_alive(process.pid)


def test_a_process_in_a_folder_that_is_gone_is_still_found(spawn):
    process = spawn(OBEYS, RUN)
    shutil.rmtree(working_folder(RUN))
    assert processes_of_run(RUN) == [process.pid]


def test_a_run_folder_that_cannot_be_made_is_one_line_with_the_remedy():
    run_folder(OURS).write_text("in the way")
    try:
        with pytest.raises(FolderUnusable, match=f"{OURS}: File exists; .* make /tmp writable") as failure:
            make_folders(OURS)
    finally:
        run_folder(OURS).unlink()
    assert "\n" not in str(failure.value)
