"""Asks a router for token ids, so that answers can be compared with the oracle token for token."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tests.support.patience import PATIENCE_S

ASK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answered:
    tokens: list[int]
    usage: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.usage["headrace"]
        return report


async def ask(client: httpx.AsyncClient, prompt: Sequence[int], num_tokens: int = 64, **more: Any) -> Answered:
    """Greedy, end-of-sequence ignored, with a report; `more` goes into the body."""
    body = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "headrace": {"report": True},
    }
    reply = await client.post("/v1/completions", json=body | more)
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return Answered(content["choices"][0]["token_ids"], content["usage"])


async def ask_all(url: str, prompts: Sequence[Sequence[int]], *, at_once: int, **more: Any) -> list[Answered]:
    """The answers in the prompts' order, `at_once` requests in flight."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: Sequence[int]) -> Answered:
        async with gate:
            return await ask(client, prompt, **more)

    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S) as client:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def ask_when_ready(url: str, prompts: Sequence[Sequence[int]], num_nodes: int) -> list[Answered]:
    """`ask_all`, one at a time, once so many nodes are registered."""
    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S) as client, asyncio.timeout(PATIENCE_S):
        while len((await client.get("/cluster")).json()["nodes"]) < num_nodes:
            await asyncio.sleep(0.05)
    return await ask_all(url, prompts, at_once=1)


if __name__ == "__main__":  # inside another network namespace: URL NODES, prompts as JSON on standard input
    answers = asyncio.run(ask_when_ready(sys.argv[1], json.load(sys.stdin), int(sys.argv[2])))
    print(json.dumps([asdict(answer) for answer in answers]))
