"""A running 1P1D cluster, for clients of an environment of their own.

Nothing of Headrace is imported here: `.venv` runs it, and `.venv-clients` the clients: `make clients`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tiny_models/headrace-tiny-qwen3.5"
PATIENCE_S = 120.0
# Without the clients, as in `make test`, there is nothing to collect.
collect_ignore_glob = [] if importlib.util.find_spec("langchain_openai") else ["test_*.py"]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of Headrace's processes, which ends with the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(ROOT / ".venv/bin/python"), "-m", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as running:
        try:
            yield running
        finally:
            running.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """The URL of a router with one prefill and one decode node of the tiny model."""
    port, control = free_port(), free_port()
    url, model = f"http://127.0.0.1:{port}", ("--model", str(MODEL))
    node = ("node", "--router", f"127.0.0.1:{control}", *model, "--cache-bytes", str(64 << 20))
    with ExitStack() as stack:
        router = ("router", "--model-path", str(MODEL), "--port", str(port), "--control-port", str(control))
        running = [stack.enter_context(process(*router))]
        for role in ("prefill", "decode"):
            running.append(stack.enter_context(process(*node, "--role", role, "--name", role)))
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_ready(url):
            assert all(each.poll() is None for each in running), "a process of the cluster has ended"
            assert time.monotonic() < deadline_s, f"the cluster was not ready within {PATIENCE_S:g} s"
            time.sleep(0.2)
        yield url


@pytest.fixture
def node_js() -> Callable[..., Any]:
    """`node_js("chat.mjs", URL, ...)`: what a script of this folder writes; `make clients` installs its packages."""

    def run(script: str, *arguments: str) -> Any:
        command = ["node", str(Path(__file__).with_name(script)), sys.prefix, *arguments]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return run


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10):
            return True
    except OSError:
        return False
