"""Nodes that draft find as much in their caches as nodes that do not, in the scenarios of `test_cache_scenarios.py`.

What is compared is each request's way through the cluster, its answer, and what each node had of its prompt.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_node.config import LocalPrefillConfig
from headrace.speculation.config import SpeculationConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ASK_TIMEOUT_S, ask
from tests.support.cluster.cluster import ALWAYS_REMOTE, SMALL, Cluster
from tests.support.engine.oracle import random_prompt

MODEL = Path(__file__).parents[2] / "tiny_models" / "headrace-tiny-qwen3.5"
VOCABULARY = 4096
OFF = SpeculationConfig()
# What is fetched depends on measured times. In float32 all answers are equal.
NO_FETCH = {"fetch_from_others": FetchConfig(enabled=False)}
# A prefill node that a busy machine keeps from answering for some seconds gets no work, and the decode node computes.
PATIENT = {"heartbeat_s": 4.0}
ENGINE = replace(SMALL, dtype="float32", max_step_tokens=8192, cache_bytes=192 << 20, state_share=0.8)
QUESTIONS = ("What is the code of June?", "And of Mia?", "Tell me a story about Mia.", "Who is June?", "Tell me more.")
CODES = "The code of June is 471. The code of Mia is 208. " * 4
HARBOUR = "The code of the harbour is 335. Ben lives near the mill. " * 12

pytestmark = pytest.mark.slow

Found = tuple[Any, ...]


def found(usage: dict[str, Any], answer: object) -> Found:
    """The way, the prompt's tokens that no node computed, what the prefill and the decode node had, and the answer."""
    report = usage["headrace"]
    prefill, decode = report.get("prefill") or {}, report["decode"]
    hits = prefill.get("attention_hit_tokens"), prefill.get("state_hit_tokens"), decode["attention_hit_tokens"]
    return report["path"], decode["state"], usage["prompt_tokens_details"]["cached_tokens"], *hits, answer


class Asked:
    """Asks one cluster and notes what was found, and all drafts."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.found: dict[str, list[Found]] = {}
        self.drafted = self.accepted = 0

    def _note(self, scenario: str, usage: dict[str, Any], answer: object) -> None:
        decode = usage["headrace"]["decode"]
        self.drafted += decode["drafted_tokens"]
        self.accepted += decode["accepted_tokens"]
        self.found.setdefault(scenario, []).append(found(usage, answer))

    async def complete(self, scenario: str, prompt: Sequence[int], num_tokens: int, **own: Any) -> None:
        answer = await ask(self._http, prompt, num_tokens=num_tokens, headrace={"report": True, **own})
        self._note(scenario, answer.usage, tuple(answer.tokens))

    async def chat(self, scenario: str, messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "max_tokens": 40, "temperature": 0, "headrace": {"report": True}}
        reply = await self._http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        content = reply.json()
        text: str = content["choices"][0]["message"]["content"]
        self._note(scenario, content["usage"], text)
        return text


async def play(asked: Asked) -> None:
    """All scenarios, one after the other: none shares a block with another."""
    first = random_prompt(4584, vocab_size=VOCABULARY)
    second = [*first[:1632], *random_prompt(4584 - 1632, seed=1, vocab_size=VOCABULARY)]
    for prompt in (first, second, second):
        await asked.complete("a third shared", prompt, 24)
    messages = [{"role": "system", "content": CODES}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": await asked.chat("five turns", messages)})
    for question in ("Where does Ben live? " * 8, "What is the code of the harbour? " * 8):
        shared = [{"role": "system", "content": HARBOUR}, {"role": "user", "content": question}]
        await asked.chat("one system prompt", shared)
    prompt = random_prompt(200, seed=7, vocab_size=VOCABULARY)
    for tenant in ("one", "two", "one"):
        await asked.complete("two tenants", prompt, 24, salt=tenant)


async def played(speculation: SpeculationConfig, policy: str, local: LocalPrefillConfig, folder: Path) -> Asked:
    engine = replace(ENGINE, speculation=speculation, checkpoint_policy=policy)
    folder.mkdir()
    decode = {"local_prefill": local}
    with Cluster(MODEL, folder, engine=engine, prefill=NO_FETCH, decode=decode, router=PATIENT) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as http:
            asked = Asked(http)
            await play(asked)
        cluster.idle_nodes(["p0", "d0"])
    shutil.rmtree(folder)
    print(f"\n{policy}, {speculation.drafter} {speculation.count}: {asked.accepted} of {asked.drafted} drafts right")
    for scenario, requests in asked.found.items():
        print(f"  {scenario}: {[request[:-1] for request in requests]}")
    return asked


SOME = (("mtp", "fixed"), ("ngram", "fixed"), ("suffix", "auto"))
OTHERS = (("mtp", "auto"), ("suffix", "fixed"))
RESUMING = LocalPrefillConfig()


@pytest.mark.parametrize(
    ("policy", "local", "drafters"),
    [
        pytest.param("align", RESUMING, SOME, id="align, the decode node may resume"),
        pytest.param("align", ALWAYS_REMOTE, OTHERS, id="align, always remote"),
        pytest.param("every", RESUMING, OTHERS, id="every, the decode node may resume"),
        pytest.param("every", ALWAYS_REMOTE, SOME, id="every, always remote"),
        pytest.param("branch", RESUMING, (*SOME, *OTHERS), id="branch, the decode node may resume"),
        pytest.param("branch", ALWAYS_REMOTE, SOME[:1], id="branch, always remote"),
    ],
)
async def test_hits_are_those_without_drafts(
    policy: str, local: LocalPrefillConfig, drafters: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    """Each drafter meets each policy, and both ways of a prompt."""
    plain = await played(OFF, policy, local, tmp_path / "plain")
    assert plain.drafted == 0
    for drafter, count in drafters:
        asked = await played(SpeculationConfig(drafter, count), policy, local, tmp_path / "drafting")
        assert asked.found == plain.found
        if count == "fixed":
            assert 0 < asked.accepted <= asked.drafted
