"""Supervisors in the background: started, and stopped by `headrace down`."""

import pytest

from deploy.daemon import start_detached, stop_run
from deploy.errors import AlreadyRunning, NotRunning
from tests.support.deploy.run_processes import ELSEWHERE, IGNORES_SIGTERM, OBEYS, RUN, STOPS_SLOWLY, claim_by
from tests.support.patience import PATIENCE_S


def test_starting_a_running_name_in_the_background_leaves_its_log(runs):
    with runs.claim("x", "abc", 15.0):
        runs.log_path("x").write_text("what it said so far")
        with pytest.raises(AlreadyRunning, match="headrace down x"):
            start_detached(["--help"], "x", runs, start_timeout_s=20.0, stop_timeout_s=1.0)
        assert runs.log_path("x").read_text() == "what it said so far"


def test_down_stops_the_supervisor_and_forgets_it(runs, spawn):
    supervisor = spawn(OBEYS, ELSEWHERE)
    claim_by(runs, supervisor.pid)
    stop_run("x", runs)
    assert supervisor.wait(PATIENCE_S) == -15
    assert runs.find("x") is None
    with pytest.raises(NotRunning):
        stop_run("x", runs)


def test_down_kills_a_supervisor_that_does_not_obey(runs, spawn):
    supervisor = spawn(IGNORES_SIGTERM, ELSEWHERE)
    claim_by(runs, supervisor.pid, stop_timeout_s=0.1)
    stop_run("x", runs, margin_s=0.2)
    assert supervisor.wait(PATIENCE_S) == -9


def test_down_waits_for_a_supervisor_as_long_as_its_nodes_may_take_to_stop(runs, spawn):
    supervisor = spawn(STOPS_SLOWLY, ELSEWHERE)
    claim_by(runs, supervisor.pid, stop_timeout_s=30.0)
    stop_run("x", runs, margin_s=0.0)
    assert supervisor.wait(PATIENCE_S) == 7


def test_down_clears_up_after_a_killed_supervisor(runs, spawn):
    supervisor, orphan = spawn(OBEYS, ELSEWHERE), spawn(OBEYS, RUN)
    claim_by(runs, supervisor.pid, run_id=RUN)
    supervisor.kill()
    supervisor.wait()
    stop_run("x", runs)
    assert orphan.wait(PATIENCE_S) == -9
