"""The `headrace` command: what it imports, and how it ends."""

import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from deploy.cli import main
from headrace.config import load
from router.keys import ApiKey, KeyFile, hash_of
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "tiny_models" / "headrace-tiny-qwen3.5")
HEAVY = ("torch", "ray", "pydantic", "grpc", "transformers", "tokenizers", "httpx", "yaml")


class Ended(NamedTuple):
    """Of a command."""

    returncode: int | str
    stdout: str
    stderr: str


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.fixture
def headrace_here(monkeypatch, capsys) -> Callable[..., Ended]:
    """A command that ends before it starts anything, in this process: a new one takes 1.5 s to import it."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return run


def test_help_waits_for_no_large_package() -> None:
    code = f"""
import sys
from deploy.cli import app
try:
    app(["--help"])
except SystemExit:
    print("imported", *(set(sys.modules) & set({HEAVY})))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines()[-1] == "imported", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("deploy.supervisor", {"torch", "triton", "ucxx", "grpc", "tokenizers", "fastapi"}),
        ("node.server", {"torch._dynamo", "sympy", "transformers", "fastapi", "ray"}),
    ],
)
def test_a_process_waits_for_no_large_package_of_the_others(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_every_command_is_listed() -> None:
    help_text = headrace("--help").stdout
    names = ("up", "settings", "status", "role", "explain", "chat", "down", "demo", "node", "router")
    assert all(f"\n  {name} " in help_text for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up"], "headrace: command line: model is missing: give the checkpoint's folder"),
        (["up", "-c", "/none.yaml"], "headrace: /none.yaml: No such file"),
        (["node"], "node: command line: model_path is missing: give --model"),
        (["node", "--model", "m", "--port", "70000"], "node: command line: port 70000: must lie in 0..65535"),
        (["router", "--model-path", "/none"], "router: command line: model_path /none: no config.json there"),
    ],
)
def test_wrong_settings_are_one_message_and_status_2(arguments: list[str], message: str, headrace_here) -> None:
    done = headrace_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_is_shown_once_and_its_line_is_one_of_a_key_file(headrace_here) -> None:
    done = headrace_here("key", "ann", "--tenant", "acme", "--tokens-per-minute", "500")
    key, line = done.stderr.split()[0], yaml.safe_load(f"api_keys:\n{done.stdout}")
    keys = load(KeyFile, line, "keys.yaml").api_keys
    assert keys == {"ann": ApiKey(hash_of(key), tenant="acme", tokens_per_minute=500)}
    assert key not in done.stdout
    wrong = headrace_here("key", "a b")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "api_keys 'a b': at most 64 letters" in wrong.stderr


def test_a_cluster_that_does_not_run_is_one_message_and_status_1(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = headrace("status", "nobody")
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "headrace: no cluster 'nobody' runs here: start one with `headrace up`",
    )


def test_the_command_tells_its_release(headrace_here) -> None:
    ended = headrace_here("--version")
    assert (ended.returncode, ended.stdout) == (0, f"headrace {version('headrace')}\n")


@pytest.mark.parametrize("command", [["status"], ["chat"], ["scale", "--both", "1"], ["role", "d0", "both"]])
def test_a_cluster_is_named_as_up_names_it(command: list[str], tmp_path: Path, monkeypatch, headrace_here) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "no cluster 'nobody' runs here" in headrace_here(*command, "--name", "nobody").stderr


@pytest.mark.parametrize(
    "arguments", [["status"], ["down"], ["chat"], ["up", "--model", MODEL, "-d"], ["up", "--model", MODEL], ["demo"]]
)
def test_a_state_folder_that_cannot_be_made_is_one_message_and_status_1(
    arguments, tmp_path: Path, monkeypatch, headrace_here
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = (headrace if "demo" in arguments else headrace_here)(*arguments)  # the demo takes over signals first
    assert done.returncode == 1
    assert "Not a directory" in done.stderr and "XDG_STATE_HOME" in done.stderr
    assert len(done.stderr.splitlines()) <= 4, done.stderr  # one message, wrapped
    assert "Traceback" not in done.stderr


def test_a_ray_address_where_nothing_listens_is_one_message_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        done = headrace("up", "--model", MODEL, "--address", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert "nothing listens there" in done.stderr and "Traceback" not in done.stderr
