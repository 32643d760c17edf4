"""The `headrace` command of a test, and that nothing is left of it afterwards."""

import pytest

from tests.support.cluster.shell import Shell


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    yield shell
    left = shell.processes()
    shell.kill_everything()
    assert not left
    assert not (shell.folder / ".ray").exists(), "Ray left files in the user's home"
