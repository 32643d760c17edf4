"""Run records: who has a cluster's name, and for how long."""

import stat
from pathlib import Path

import pytest

from deploy.errors import AlreadyRunning, FolderUnusable, NotRunning
from deploy.runs import RunDirectory
from tests.support.deploy.run_processes import OBEYS, RUN, claim_by


def test_a_claimed_name_is_found_until_it_is_given_back(runs):
    with runs.claim("x", "abc", 15.0) as record:
        assert runs.running("x") == record
        with pytest.raises(NotRunning, match="still starting"):
            runs.ready("x")
        runs.publish(record, ["http://127.0.0.1:9"], "ray")
        assert runs.ready("x").urls == ("http://127.0.0.1:9",)
    assert runs.find("x") is None


def test_a_run_has_its_key_in_a_record_for_its_user_alone(runs, tmp_path):
    with runs.claim("x", "abc", 15.0, "hr-key") as record:
        runs.publish(record, ["http://127.0.0.1:9"], "ray")
        assert runs.ready("x").api_key == "hr-key"
        assert "hr-key" not in repr(runs.ready("x"))
        (file,) = [each for each in tmp_path.rglob("x.json")]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


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


def test_a_state_folder_that_cannot_be_used_is_one_line_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    runs = RunDirectory(tmp_path / "file" / "headrace")
    for use in (lambda: runs.find("x"), lambda: runs.open_log("x"), lambda: runs.claim("x", "abc", 15.0).__enter__()):
        with pytest.raises(FolderUnusable, match=r"file/headrace.*: Not a directory; .*set XDG_STATE_HOME") as failure:
            use()
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize("content", ["", "[]", '{"name": "x"}', '{"name": "x", "urls": [], "of": "another release"}'])
def test_a_damaged_run_record_is_named(runs, content):
    runs.log_path("x").with_suffix(".json").write_text(content)
    with pytest.raises(FolderUnusable, match=r"x\.json: not a run record of this release; remove it"):
        runs.find("x")


def test_a_user_without_a_home_needs_a_state_folder(monkeypatch):
    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(FolderUnusable, match="Set XDG_STATE_HOME"):
        RunDirectory.of_user({})
