"""Questions to a router over fake nodes that know one answer."""

import asyncio
from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, FakeDecodeNode, FakePrefillNode
from tests.unit.router.conftest import Running

TEXT = "The code of June is 471. A channel carries the stream over stones."


@pytest.fixture
def answer(tokens: ModelTokens) -> list[int]:
    return [*tokens.encode(TEXT), 0]


async def ask(running: Running, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "What is the code of June?", "max_tokens": 100, "headrace": {"report": True}} | fields
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def text_of(result: dict[str, Any]) -> str:
    return result["choices"][0]["text"]


def prefill_node(cluster: FakeCluster, name: str) -> FakePrefillNode:
    node = cluster.nodes[name]
    assert isinstance(node, FakePrefillNode)
    return node


def decode_node(cluster: FakeCluster, name: str) -> FakeDecodeNode:
    node = cluster.nodes[name]
    assert isinstance(node, FakeDecodeNode)
    return node


async def at_the_gate(node: FakeDecodeNode) -> None:
    """Returns once a call of the node has sent all that it may: its next tokens wait for a permit."""
    assert node.gate is not None
    async with asyncio.timeout(PATIENCE_S):
        while not node.gate._waiters:
            await asyncio.sleep(0.001)


async def assert_idle(running: Running) -> None:
    """Asserts that every call is left and every request has ended as soon as the answer is there."""
    for node in running.cluster.nodes.values():
        assert node.open_calls == 0, f"{node.name} still has calls"
    phases = (await running.http.get("/cluster")).json()["phases"]
    assert {phase for phase, count in phases.items() if count} <= {"done", "failed"}
