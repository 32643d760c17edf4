"""What attention compiles for one step serves every other: nothing is compiled while requests wait."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_form_of_each_kernel_takes_tables_of_any_width_at_any_place(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.attention_forms_child"]
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=ROOT, env=environment, check=True)
    found = json.loads(done.stdout)
    assert len(found["splits"]) > 3
    assert sorted(found["compiled"]) == [
        "_decode_kernel", "_extend_kernel", "_merge_kernel", "_merge_kernel", "_prefill_kernel",
    ]  # fmt: skip
