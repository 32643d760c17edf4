"""Structured output across processes: the form survives the hand-over, and the loss of the node that writes it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S
from tests.support.cluster.cluster import Cluster, wait_until

LINE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["stream", "river", "canal"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "depth"],
    "additionalProperties": False,
}
SHORT = {"type": "array", "items": LINE, "minItems": 2, "maxItems": 2}
NO_SPACE = {"x-guidance": {"whitespace_flexible": False}}
LONG = {"type": "array", "items": LINE, "minItems": 40, "maxItems": 40} | NO_SPACE  # outlasts two heartbeats


def question(schema: object, seed: int, **more: Any) -> dict[str, Any]:
    """A chat whose answer has a form; seed 0 is greedy."""
    form = {"type": "json_schema", "json_schema": {"name": "waters", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": f"List the waters of valley {seed}."}]
    settings = {"temperature": 1.2 if seed else 0, "seed": seed, "max_tokens": 3600}
    return {"messages": messages, "response_format": form, "headrace": {"report": True}} | settings | more


async def asked(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def content(answer: dict[str, Any], schema: object) -> str:
    """The answer's text, which has its form."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    return str(choice["message"]["content"])


@pytest.fixture(scope="module")
def cluster(tiny_checkpoint, tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("grammars")) as cluster:
        yield cluster


async def test_an_answer_has_its_form_across_the_hand_over_and_a_seed_repeats_it(cluster: Cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
        bodies = [question(SHORT, seed) for seed in (0, 1, 2, 0, 1, 2)]
        answers = await asyncio.gather(*(asked(client, body) for body in bodies))
        assert answers[0]["usage"]["headrace"]["prefill"]["node"] == "p0"
        texts = [content(answer, SHORT) for answer in answers]
        assert texts[:3] == texts[3:]
        assert len(set(texts)) == 3


async def test_a_form_of_one_token_ends_on_the_prefill_node(cluster: Cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
        body = {"prompt": "Is it? ", "structured_outputs": {"choice": ["Y", "N"]}, "max_tokens": 9}
        reply = (await client.post("/v1/completions", json=body)).json()
        (choice,) = reply["choices"]
        assert (choice["text"] in ("Y", "N"), choice["finish_reason"]) == (True, "stop")
        assert reply["usage"]["completion_tokens"] == 1


async def test_a_token_that_no_grammar_can_name_is_refused_by_the_node(cluster: Cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
        reply = await client.post("/v1/completions", json={"prompt": "a", "guided_grammar": "start: <|nothing|>"})
        assert reply.status_code == 400
        assert "unknown special token" in reply.json()["error"]["message"]


async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event, after: int
) -> tuple[str, str, int]:
    """The answer's text, why it ended, and its migrations; `begun` is set when `after` pieces of it have come."""
    text, pieces, reason, migrations = "", 0, "", -1
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                pieces += 1
                if pieces == after:
                    begun.set()
            if event.get("usage"):
                migrations = event["usage"]["headrace"]["migrations"]
    return text, reason, migrations


def decoding(cluster: Cluster) -> list[str]:
    return [name for name, node in cluster.nodes().items() if name[0] == "d" and node["running"]]


@pytest.mark.slow
async def test_a_decode_node_killed_in_the_middle_of_an_answer_costs_nothing_of_its_form(
    tiny_checkpoint, tmp_path: Path, pytestconfig: pytest.Config
):
    """Not always with the tokens that it would have had: another node's rounding may turn a draw."""
    with Cluster(tiny_checkpoint("qwen35"), tmp_path, num_decode=2) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
            for seed in range(pytestconfig.getoption("--grammar-rounds")):
                await asyncio.to_thread(cluster.idle_nodes, ["d0", "d1", "p0"])  # as their next heartbeats say
                begun = asyncio.Event()
                asking = asyncio.create_task(streamed(client, question(LONG, seed), begun, 20 + 7 * seed % 150))
                await begun.wait()
                await asyncio.to_thread(wait_until, lambda: decoding(cluster), "a heartbeat says who decodes")
                (serving,) = decoding(cluster)
                cluster.processes[serving].kill()
                text, reason, migrations = await asking
                assert (reason, migrations) == ("stop", 1)
                jsonschema.validate(json.loads(text), LONG)
                cluster.processes.pop(serving).wait()
                await asyncio.to_thread(wait_until, lambda gone=serving: gone not in cluster.nodes(), "it is known")
                cluster.start_node(serving)
                await asyncio.to_thread(cluster.wait_for_nodes, 3)
