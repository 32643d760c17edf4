"""The committed stubs are those that proto/ gives."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
GENERATED = ROOT / "headrace" / "wire" / "generated"


def test_stubs_are_up_to_date(tmp_path: Path):
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    if not plugin.exists():
        pytest.skip("protoc-gen-mypy is not installed beside this Python")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "mypy", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--plugin=protoc-gen-mypy={plugin}"]
    command += ["-I", "headrace/wire/generated=proto", *outputs, "headrace/wire/generated/headrace.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S)
    fresh = list((tmp_path / "headrace" / "wire" / "generated").iterdir())
    assert {file.name for file in fresh} == {"headrace_pb2.py", "headrace_pb2.pyi", "headrace_pb2_grpc.py"}
    for file in fresh:
        stale = f"headrace/wire/generated/{file.name} is stale: run `make proto`"
        assert (GENERATED / file.name).read_text() == file.read_text(), stale
