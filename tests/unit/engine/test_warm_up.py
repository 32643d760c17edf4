"""The warm-up compiles every kernel of later steps: nothing is compiled while requests wait; and it is sound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.engine.warm_up import warm_up
from tests.support.engine.driving import fail_launches, small_engine
from tests.support.kernels.compiled import lost_addresses

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", [pytest.param("granite_moe", marks=pytest.mark.slow), "qwen35"])
def test_no_step_compiles_a_kernel_and_none_is_miscompiled(family: str, tiny_checkpoint, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.engine.warm_up_child", str(tiny_checkpoint(family))]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=240, cwd=ROOT, env=environment, check=True)
    found = json.loads(done.stdout)
    assert {"_decode_kernel", "_extend_kernel", "_prefill_kernel"} <= set(found["warm_up"])
    assert found["steps"] == []
    with_matrix_units = [ptx.with_suffix(".cubin") for ptx in tmp_path.rglob("*.ptx") if "wgmma" in ptx.read_text()]
    assert with_matrix_units
    assert {cubin.stem: wrong for cubin in with_matrix_units if (wrong := lost_addresses(cubin.read_bytes()))} == {}


def test_a_device_without_memory_for_the_longest_scored_prompt_fails_at_the_start(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("qwen35"), max_step_tokens=64)
    fail_launches(built, lambda inputs: max(each.num_logits for each in inputs) >= 60)
    with pytest.raises(torch.OutOfMemoryError):
        warm_up(built.engine._runner, max_step_tokens=64, max_running=4, max_tokens=200, graphs=False)
