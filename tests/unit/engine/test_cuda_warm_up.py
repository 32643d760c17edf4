"""A GPU's warm-up in a fresh process, with nothing compiled before: the rehearsal knows all kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ROOT = Path(__file__).parents[3]
NAME_WHO_COMPILES = """
import json, sys, threading
from pathlib import Path
from triton import knobs
from tests.support.engine.driving import small_engine

threads = []
knobs.compilation.listener = lambda **compilation: threads.append(threading.current_thread().name.split("_")[0])
small_engine(Path(sys.argv[1]), device="cuda", hopper_kernels=sys.argv[2] == "hopper")
print(json.dumps(threads))
"""


@pytest.mark.parametrize("kernels", ["hopper", "triton"])
@pytest.mark.parametrize("family", ["granite", "granite_moe", "qwen35", "qwen35_moe"])
def test_no_kernel_is_left_to_compile_when_the_work_is_done_in_earnest(
    family: str, kernels: str, tiny_checkpoint, tmp_path
) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", NAME_WHO_COMPILES, str(tiny_checkpoint(family)), kernels]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, cwd=ROOT, env=environment, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == {"compile"}
