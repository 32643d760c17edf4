"""The wheel: what `pip install headrace` puts into site-packages."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = {"headrace", "transfer", "node_runtime", "prefill_node", "decode_node", "node", "router", "deploy"}
NOT_COPIED = (".*", "build", "*.egg-info", "__pycache__", "shared", "docs", "headrace-tiny-granite-h")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders in its source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    done = subprocess.run([*command, folder / "source"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("headrace-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_nothing_but_the_products_packages_is_importable(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert (ROOT / "benchmarks").is_dir() and (ROOT / "tests").is_dir()  # they were there to be taken along


def test_every_module_of_the_source_tree_is_in(names: set[str]) -> None:
    modules = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if "__pycache__" not in file.parts
    }
    assert {name for name in names if name.endswith(".py")} == modules


def test_data_files_are_in(names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {"router/api/static/index.html", "deploy/demo_chat.yaml", "deploy/examples/gpu.yaml"} <= names
    model = {f"deploy/demo_model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert {*model, "deploy/demo_model/chat_template.jinja"} <= names


def test_the_licence_travels_with_it(wheel: Path, names: set[str]) -> None:
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_demo_finds_its_model_and_its_questions_outside_of_a_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from deploy import demo; config = demo._demo_cluster();print(config.model); print(demo.demo_chat().answer)"
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    model, answer = done.stdout.splitlines()
    assert Path(model) == tmp_path / "site" / "deploy" / "demo_model"
    assert answer.startswith("The code of ")
