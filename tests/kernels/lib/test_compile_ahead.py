"""Work whose kernels are compiled ahead launches nothing then, and finds them compiled afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
EACH_COUNT = [[count, amount, 16] for count in (40, 50) for amount in (1, 2, 3, 3)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.kernels.compiling_child"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, cwd=ROOT, env=environment, check=True)
    return json.loads(done.stdout)


def test_nothing_is_launched_but_what_other_threads_launch(found: dict) -> None:
    assert found["asked"]["launches"] == [[20, 9, 16]]


def test_each_form_is_compiled_once_and_loaded_by_the_thread_that_compiled_it(found: dict) -> None:
    """Compiled are amounts 1, 2 and 3 misaligned (3 aligned was before), and the other thread's, by that thread."""
    assert found["asked"]["compiled"] == [False] * 4
    assert sorted(found["asked"]["loaders"]) == ["Thread-1 (<lambda>)", "compile", "compile", "compile"]


def test_the_work_itself_compiles_nothing_and_launches_everything_in_order(found: dict) -> None:
    assert found["real"] == {"launches": EACH_COUNT, "compiled": [], "loaders": []}


def test_how_far_it_has_come_is_logged(found: dict) -> None:
    assert found["progress"][:3] == [f"compiled {done} of 3 kernels" for done in (1, 2, 3)]


def test_what_cannot_be_compiled_is_raised(found: dict) -> None:
    assert "no_such_thing" in found["error"]
