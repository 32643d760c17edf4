"""Run records: who has a cluster's name, and for how long."""

from pathlib import Path

import pytest

from deploy.errors import AlreadyRunning, NotRunning
from deploy.runs import RunDirectory
from tests.support.deploy.run_processes import OBEYS, RUN, claim_by


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


def test_the_name_of_a_killed_supervisor_is_free_again(runs, spawn):
    dead = spawn(OBEYS, RUN)
    claim_by(runs, dead.pid)
    dead.kill()
    dead.wait()
    with pytest.raises(NotRunning):
        runs.running("x")
    with runs.claim("x", "def", 15.0) as record:
        assert runs.running("x") == record


@pytest.mark.parametrize(
    ("environ", "folder"),
    [({"HOME": "/home/a"}, "/home/a/.local/state/headrace"), ({"HOME": "/h", "XDG_STATE_HOME": "/s"}, "/s/headrace")],
)
def test_records_live_in_the_users_state_folder(environ, folder, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert RunDirectory.of_user(environ).log_path("x") == Path(folder) / "x.log"
