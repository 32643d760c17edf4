"""The prefill and the decode node on two hosts: two network namespaces, UCX over TCP between them."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig
from router.config import RouterConfig
from tests.support.cluster.cluster import ALWAYS_REMOTE, SMALL, Process
from tests.support.cluster.netns import Namespace, NamespacesUnavailable, two_namespaces
from tests.support.engine.oracle import greedy_along, random_prompt
from transfer.ucx import UcxConfig


def ask_inside(host: Namespace, url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*host.enter, sys.executable, "-m", "tests.support.cluster.asking", url, "2"],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_two_hosts_answer_like_transformers(family: str, tiny_checkpoint, tmp_path: Path) -> None:
    model = tiny_checkpoint(family)
    prompts = [random_prompt(length) for length in (1, 17, 64, 500)]
    with ExitStack() as undo:
        try:
            left, right = undo.enter_context(two_namespaces())
        except NamespacesUnavailable as reason:
            pytest.skip(f"no network namespaces here: {reason}")

        def start(host: Namespace, name: str, config: object) -> Process:
            process = Process.start(name, config, tmp_path, namespace=host.name)
            undo.callback(process.stop)
            return process

        def node(host: Namespace, name: str) -> dict[str, Any]:
            return {
                "name": name,
                "model_path": str(model),
                "router_addresses": (router.ready["control_address"],),
                "host": host.address,
                "engine": SMALL,
                # Not CMA: it reaches across network namespaces and would make the test a lie.
                "ucx": UcxConfig(transports="tcp", net_devices=host.device),
            }

        router = start(
            left,
            "router",
            RouterConfig(model, host=left.address, port=0, control_host=left.address, control_port=0, roles="fixed"),
        )
        start(left, "p0", NodeConfig(**node(left, "p0"), role="prefill"))
        start(right, "d0", NodeConfig(**node(right, "d0"), role="decode", local_prefill=ALWAYS_REMOTE))
        answers = ask_inside(left, router.ready["url"], prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["tokens"]) == 64
        assert answer["tokens"] == greedy_along(model, prompt, answer["tokens"])
    assert {answer["usage"]["headrace"]["path"] for answer in answers} == {"remote"}
    moved = [answer["usage"]["headrace"]["transfer"]["attention_tokens"] for answer in answers]
    assert moved == [1, 17, 64, 500]
