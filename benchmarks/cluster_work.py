"""What a cluster is asked in `benchmarks.gpu_cluster`, and what of the answers counts. Prompts are random token ids."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.streaming import Answer, body_of, stream

SETTLE_S = 0.5  # between a chat's turns, or before a prompt comes again: what nodes hold has reached the router by then
VOCABULARY = range(300, 4000)


@dataclass(frozen=True)
class Load:
    """Of many requests, a fixed number in flight. Times in seconds."""

    requests_a_s: float
    first_token_p50_s: float
    gap_p50_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Load:
        gaps = [gap for answer in answers for gap in answer.gaps_s]
        return cls(
            len(answers) / seconds,
            statistics.median(answer.first_token_s for answer in answers),
            statistics.median(gaps),
        )


class Client:
    """Asks one router. `deadline_s` (perf_counter) ends everything; each request has `timeout_s` at most."""

    def __init__(self, url: str, deadline_s: float, timeout_s: float = 60.0) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s

    async def ask(self, prompt: Sequence[int], num_tokens: int, checkpoint_at: Sequence[int] = ()) -> Answer:
        """Raises RequestFailed, TimeoutError, OSError."""
        return await self._send(body_of(prompt, num_tokens, checkpoint_at), num_tokens)

    async def load(self, prompt_tokens: int, num_tokens: int, at_once: int, total: int, seed: int) -> Load:
        """A closed loop: as one answer ends, the next prompt goes out. `at_once` more prompts warm it up before."""
        bodies = [body_of(fresh(prompt_tokens, seed * 100_000 + i), num_tokens) for i in range(at_once + total)]
        await asyncio.gather(*(self._send(body, num_tokens) for body in bodies[:at_once]))
        waiting = iter(bodies[at_once:])
        answers: list[Answer] = []

        async def worker() -> None:
            for body in waiting:
                answers.append(await self._send(body, num_tokens))

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(worker())
        return Load.of(answers, time.perf_counter() - began_s)

    async def again(self, prompt_tokens: int, times: int, seed: int) -> list[Answer]:
        """The answers to a prompt that was asked once before."""
        prompt = fresh(prompt_tokens, seed)
        answers = []
        for _ in range(1 + times):
            answers.append(await self.ask(prompt, 2))
            await asyncio.sleep(SETTLE_S)
        return answers[1:]

    async def sharers(self, shared: int, new: int, times: int, seed: int) -> list[int]:
        """Cached tokens of prompts behind one shared prefix, whose end the client names; the first one's left out."""
        prefix = fresh(shared, seed)
        cached = []
        for i in range(1 + times):
            prompt = [*prefix, *fresh(new, seed + 1 + i)]
            cached.append((await self.ask(prompt, 8, checkpoint_at=[shared])).cached_tokens)
            await asyncio.sleep(SETTLE_S)
        return cached[1:]

    async def chat(self, first: int, new: int, answer_tokens: int, turns: int, seed: int) -> list[tuple[int, int]]:
        """Of each turn but the first: cached tokens, and the whole turn before it, prompt and answer."""
        prompt = fresh(first, seed)
        told = []
        for turn in range(turns):
            before = len(prompt) - new
            answer = await self.ask(prompt, answer_tokens)
            told.append((answer.cached_tokens, before))
            print(f"  turn {turn + 1} of {len(prompt):,}: {1e3 * answer.first_token_s:.1f} ms", flush=True)
            prompt = [*prompt, *answer.tokens, *fresh(new, seed + 1 + turn)]
            await asyncio.sleep(SETTLE_S)
        return told[1:]

    async def _send(self, body: bytes, num_tokens: int) -> Answer:
        left_s = self._deadline_s - time.perf_counter()
        if left_s <= 0:
            raise TimeoutError("the benchmark's own deadline has passed")
        return await stream(self._url, body, num_tokens, min(left_s, self._timeout_s))


def fresh(num_tokens: int, seed: int) -> list[int]:
    """Another prompt for each seed: no prefix of it is cached."""
    return random.Random(seed).choices(VOCABULARY, k=num_tokens)
