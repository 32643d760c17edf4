"""What a warm-up compiles serves every step: nothing is compiled while requests wait."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", [pytest.param("granite_moe", marks=pytest.mark.slow), "qwen35"])
def test_no_step_compiles_a_kernel_of_its_own(family: str, tiny_checkpoint, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.warm_up_child", str(tiny_checkpoint(family))]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=240, cwd=ROOT, env=environment, check=True)
    found = json.loads(done.stdout)
    assert {"_decode_kernel", "_extend_kernel", "_prefill_kernel"} <= set(found["warm_up"])
    assert found["steps"] == []
