import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.daemon import start_detached, stop_run
from deploy.errors import AlreadyRunning, NotRunning
from deploy.processes import (
    end_processes_of_run,
    is_alive,
    make_folders,
    processes_of_run,
    started_at_s,
    wait_gone,
    working_folder,
)
from deploy.runs import RunDirectory

OBEYS = "import time; print(1, flush=True); time.sleep(60)"
STOPS_SLOWLY = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)));" + OBEYS
)
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + OBEYS


OURS = f"test-{os.getpid()}"
"""Begins the ids of these tests' runs: their folders lie in /tmp, where tests of other checkouts run, too."""
RUN, OTHER_RUN, NO_RUN, ELSEWHERE = (f"{OURS}-{name}" for name in ("run", "other", "none", "elsewhere"))


@pytest.fixture
def runs(tmp_path):
    return RunDirectory(tmp_path / "runs")


@pytest.fixture
def spawn():
    processes, folders = [], []

    def start(code, run_id):
        folder = working_folder(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(folder.parent)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        processes.append(process)
        process.stdout.read(1)  # it runs
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def claim_by(runs, pid, name="x", run_id=RUN, stop_timeout_s=15.0):
    """The record that a supervisor process of this pid would have written."""
    with runs.claim(name, run_id, stop_timeout_s) as record:
        pass
    record = replace(record, pid=pid, started_s=started_at_s(pid))
    runs.publish(record, "http://127.0.0.1:1", "ray")
    return record


def test_a_claimed_name_is_found_until_it_is_given_back(runs):
    with runs.claim("x", "abc", 15.0) as record:
        assert runs.running("x") == record
        with pytest.raises(NotRunning, match="still starting"):
            runs.ready_url("x")
        runs.publish(record, "http://127.0.0.1:9", "ray")
        assert runs.ready_url("x") == "http://127.0.0.1:9"
    assert runs.find("x") is None


def test_a_name_cannot_be_claimed_twice(runs):
    again = runs.claim("x", "def", 15.0)
    with runs.claim("x", "abc", 15.0), pytest.raises(AlreadyRunning, match="headrace down x"), again:
        pass


def test_starting_a_running_name_in_the_background_leaves_its_log(runs):
    with runs.claim("x", "abc", 15.0):
        runs.log_path("x").write_text("what it said so far")
        with pytest.raises(AlreadyRunning, match="headrace down x"):
            start_detached(["--help"], "x", runs, start_timeout_s=20.0, stop_timeout_s=1.0)
        assert runs.log_path("x").read_text() == "what it said so far"


def test_the_name_of_a_killed_supervisor_is_free_again(runs, spawn):
    dead = spawn(OBEYS, RUN)
    claim_by(runs, dead.pid)
    dead.kill()
    dead.wait()
    with pytest.raises(NotRunning):
        runs.running("x")
    with runs.claim("x", "def", 15.0) as record:
        assert runs.running("x") == record


def test_a_later_process_of_the_same_pid_is_not_the_supervisor(runs):
    assert is_alive(os.getpid(), started_at_s(os.getpid()))
    assert not is_alive(os.getpid(), started_at_s(os.getpid()) + 10)


def test_down_stops_the_supervisor_and_forgets_it(runs, spawn):
    supervisor = spawn(OBEYS, ELSEWHERE)
    claim_by(runs, supervisor.pid)
    stop_run("x", runs)
    assert supervisor.wait(1) == -15
    assert runs.find("x") is None
    with pytest.raises(NotRunning):
        stop_run("x", runs)


def test_down_kills_a_supervisor_that_does_not_obey(runs, spawn):
    supervisor = spawn(IGNORES_SIGTERM, ELSEWHERE)
    claim_by(runs, supervisor.pid, stop_timeout_s=0.1)
    stop_run("x", runs, margin_s=0.2)
    assert supervisor.wait(1) == -9


def test_down_waits_for_a_supervisor_as_long_as_its_nodes_may_take_to_stop(runs, spawn):
    supervisor = spawn(STOPS_SLOWLY, ELSEWHERE)
    claim_by(runs, supervisor.pid, stop_timeout_s=30.0)
    stop_run("x", runs, margin_s=0.0)
    assert supervisor.wait(1) == 7


def test_a_runs_folders_are_for_its_user_alone():
    working = make_folders(OURS)
    try:
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in (working, working.parent)] == [0o700, 0o700]
        assert working == working_folder(OURS)
    finally:
        shutil.rmtree(working.parent)


def test_down_clears_up_after_a_killed_supervisor(runs, spawn):
    supervisor, orphan = spawn(OBEYS, ELSEWHERE), spawn(OBEYS, RUN)
    claim_by(runs, supervisor.pid, run_id=RUN)
    supervisor.kill()
    supervisor.wait()
    stop_run("x", runs)
    assert orphan.wait(1) == -9


def test_processes_are_found_by_their_run_alone(spawn):
    one, other = spawn(OBEYS, RUN), spawn(OBEYS, OTHER_RUN)
    assert processes_of_run(RUN) == [one.pid]
    assert processes_of_run(OTHER_RUN) == [other.pid]
    assert processes_of_run(NO_RUN) == []


def test_what_is_left_at_the_deadline_is_killed(spawn):
    stubborn = spawn(IGNORES_SIGTERM, RUN)
    assert end_processes_of_run(RUN, time.monotonic() + 0.1) == [stubborn.pid]
    assert stubborn.wait(1) == -9
    assert end_processes_of_run(RUN, time.monotonic()) == []


def test_waiting_for_a_process_has_a_deadline(spawn):
    process = spawn(OBEYS, RUN)
    started_s = started_at_s(process.pid)
    assert not wait_gone(process.pid, started_s, time.monotonic() + 0.1)
    process.kill()
    assert wait_gone(process.pid, started_s, time.monotonic() + 5)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [({"HOME": "/home/a"}, "/home/a/.local/state/headrace"), ({"HOME": "/h", "XDG_STATE_HOME": "/s"}, "/s/headrace")],
)
def test_records_live_in_the_users_state_folder(environ, folder, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert RunDirectory.of_user(environ).log_path("x") == Path(folder) / "x.log"
