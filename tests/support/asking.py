"""Asks a router for token ids, so that answers can be compared with the oracle token for token."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

ASK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answered:
    tokens: list[int]
    usage: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        return self.usage["headrace"]


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
