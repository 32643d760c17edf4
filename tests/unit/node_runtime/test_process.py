"""A node's config from a file and a command line, and the process around it."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from decode_node.config import DecodeNodeConfig
from headrace.config import ConfigError
from node_runtime.process import ENGINE_FLAGS, NODE_FLAGS, main, node_config
from prefill_node.config import PrefillNodeConfig

UNSAID = dict.fromkeys([*NODE_FLAGS, *ENGINE_FLAGS, "config", "tls_ca", "tls_cert", "tls_key", "tls_server_name"])


def said(**flags: object) -> Namespace:
    return Namespace(**UNSAID | flags)


def test_without_a_file_the_defaults_are_those_of_the_config() -> None:
    config = node_config(PrefillNodeConfig, said(model_path="m"), "p0")
    assert config == PrefillNodeConfig(name="p0", model_path="m")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        "model_path: m\nname: d7\nengine: {device: 'cuda:1', load_format: dummy, max_running: 8}\n"
        "local_prefill: {max_tokens: 0}\nucx: {transports: 'tcp,cuda_copy'}\n"
    )
    config = node_config(DecodeNodeConfig, said(config=file, name="d8", device="cpu", port=9), "d0")
    assert (config.name, config.model_path, config.port) == ("d8", "m", 9)
    assert (config.engine.device, config.engine.load_format, config.engine.max_running) == ("cpu", "dummy", 8)
    assert (config.local_prefill.max_tokens, config.ucx.transports) == (0, "tcp,cuda_copy")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("engine: {load_fromat: dummy}", "engine.load_fromat is an unknown key: did you mean load_format?"),
        ("engine: {max_running: many}", "engine.max_running"),
        ("engine: dummy", "engine 'dummy': must be a mapping"),
        ("- 1", "[1] must be a mapping"),
        ("a: [", "not YAML"),
        ("ucx: {port: 70000}", "70000"),
    ],
)
def test_a_faulty_file_is_named_with_its_fault(
    text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(text)
    assert main(["--model", "m", "-c", str(file)], PrefillNodeConfig, _never_made, "p0") == 2
    assert fault in capsys.readouterr().err


def test_no_model_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give --model"):
        node_config(PrefillNodeConfig, said(), "p0")


COLLECTED = """
import gc
from types import SimpleNamespace
from node_runtime.process import run_node

class Node:
    config = info = SimpleNamespace(name="p0", address="here")

    async def start(self):
        self.weights = [[] for _ in range(100_000)]

    async def wait_closed(self):
        self.requests = [[] for _ in range(1_000)]
        print("collected", sum(isinstance(each, list) for each in gc.get_objects()))

run_node(Node())
"""


def test_a_collection_walks_what_came_after_the_start() -> None:
    # In a process of its own: what is set aside stays so.
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", COLLECTED], cwd=root, capture_output=True, timeout=60, check=True)
    assert 1_000 <= int(done.stdout.rsplit(b"collected", 1)[1]) < 5_000


def _never_made(config: object) -> object:
    raise AssertionError("a faulty config makes no node")
