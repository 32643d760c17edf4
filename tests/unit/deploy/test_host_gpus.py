"""GPUs of this host, by a driver's tool that the test puts into the path."""

from pathlib import Path

import pytest

from deploy.host_gpus import gpus_of_this_host

TWO = "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\\nGPU 1: NVIDIA H200 (UUID: GPU-2)\\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


@pytest.mark.parametrize(
    ("script", "number"), [(f"printf '{TWO}'", 2), ("echo 'No devices were found'", 0), (f"printf '{TWO}'; exit 9", 0)]
)
def test_gpus_are_those_that_the_driver_lists(driver, script: str, number: int) -> None:
    driver(script)
    assert gpus_of_this_host() == number


def test_a_host_without_a_driver_has_none(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of_this_host() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus_of_this_host() == 0


@pytest.mark.parametrize(
    ("visible", "number"),
    [("", 0), ("-1", 0), ("NoDevFiles", 0), ("3", 1), ("0,-1,1", 1), ("GPU-1,GPU-2", 2), ("0,1,2,3", 2)],
)
def test_hidden_gpus_do_not_count(driver, monkeypatch: pytest.MonkeyPatch, visible: str, number: int) -> None:
    driver(f"printf '{TWO}'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_of_this_host() == number
