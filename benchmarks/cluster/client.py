"""A client of a cluster: answers streamed over HTTP, with the time at which each token arrived, and work made of them.

A bare socket, to cost little. Prompts are random token ids; times are of `perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any
from urllib.parse import urlsplit

from router.routing.plan import NO_OBJECTIVES, Objectives

LINE_LIMIT = 1 << 20
SETTLE_S = 0.5  # before a prompt comes again: the router has by then received what the nodes hold
VOCABULARY = range(300, 4000)


class RequestFailed(RuntimeError):
    """An answer did not arrive in full."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer; `arrivals` has one time a token."""

    sent_s: float
    arrivals: tuple[float, ...]
    tokens: tuple[int, ...]
    usage: dict[str, Any]

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens, from the second one on; tokens of one event share its wait."""
        gaps: list[float] = []
        for (earlier, _), (later, together) in pairwise((at, len([*group])) for at, group in groupby(self.arrivals)):
            gaps += [(later - earlier) / together] * together
        return gaps

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no node computed."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Load:
    """Rates of a closed loop of requests."""

    requests_a_s: float
    first_token_p50_s: float
    gap_p50_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Load:
        first_p50_s = statistics.median(answer.first_token_s for answer in answers)
        return cls(len(answers) / seconds, first_p50_s, statistics.median(g for a in answers for g in a.gaps_s))


class Client:
    """Requests to one router. `deadline_s` (perf_counter) ends everything; each request has `timeout_s` at most.

    Every method raises RequestFailed, TimeoutError, OSError.
    """

    def __init__(self, url: str, deadline_s: float, timeout_s: float = 60.0) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s

    async def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        checkpoint_at: Sequence[int] = (),
        objectives: Objectives = NO_OBJECTIVES,
    ) -> Answer:
        return await self._send(body_of(prompt, num_tokens, checkpoint_at, objectives), num_tokens)

    async def load(self, prompt_tokens: int, num_tokens: int, at_once: int, total: int, seed: int) -> Load:
        """A closed loop: as one answer ends, the next prompt is sent. `at_once` more prompts warm it up."""
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
        """Answers to a prompt that was sent once before."""
        answers = []
        for _ in range(1 + times):
            answers.append(await self.ask(fresh(prompt_tokens, seed), 2))
            await asyncio.sleep(SETTLE_S)
        return answers[1:]

    async def sharers(self, shared: int, new: int, times: int, seed: int) -> list[int]:
        """Cached tokens of prompts behind one shared prefix with a checkpoint hint at its end, without the first's."""
        cached = []
        for i in range(1 + times):
            prompt = [*fresh(shared, seed), *fresh(new, seed + 1 + i)]
            cached.append((await self.ask(prompt, 8, checkpoint_at=[shared])).cached_tokens)
            await asyncio.sleep(SETTLE_S)
        return cached[1:]

    async def chat(self, first: int, new: int, answer_tokens: int, turns: int, seed: int) -> list[tuple[int, Answer]]:
        """Each turn's prompt length and answer; a user reads for SETTLE_S before the next turn."""
        prompt, answered = fresh(first, seed), []
        for turn in range(turns):
            answer = await self.ask(prompt, answer_tokens)
            answered.append((len(prompt), answer))
            prompt = [*prompt, *answer.tokens, *fresh(new, seed + 1 + turn)]
            await asyncio.sleep(SETTLE_S)
        return answered

    async def _send(self, body: bytes, num_tokens: int) -> Answer:
        left_s = self._deadline_s - time.perf_counter()
        if left_s <= 0:
            raise TimeoutError("the benchmark's own deadline has passed")
        return await stream(self._url, body, num_tokens, min(left_s, self._timeout_s))


def fresh(num_tokens: int, seed: int) -> list[int]:
    """A prompt of its own for each seed: no prefix of it is cached."""
    return random.Random(seed).choices(VOCABULARY, k=num_tokens)


def body_of(
    prompt: Sequence[int], num_tokens: int, checkpoint_at: Sequence[int] = (), objectives: Objectives = NO_OBJECTIVES
) -> bytes:
    """A greedy request that ignores the end of sequence and asks for a report."""
    return json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "headrace": {
                "report": True,
                "checkpoint_at": list(checkpoint_at),
                "objectives": asdict(objectives),
            },
        }
    ).encode()


async def stream(url: str, body: bytes, num_tokens: int, timeout_s: float) -> Answer:
    """Sends one request and reads its answer. Raises RequestFailed, TimeoutError, OSError."""
    async with asyncio.timeout(timeout_s):
        where = urlsplit(url)
        sent_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=LINE_LIMIT)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            arrivals: list[float] = []
            tokens: list[int] = []
            usage: dict[str, Any] = {}
            other: list[bytes] = []
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    other.append(line)
                    continue
                now_s = time.perf_counter()
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    ids = choice.get("token_ids") or []
                    tokens += ids
                    arrivals += [now_s] * len(ids)
        finally:
            writer.close()
    if len(tokens) != num_tokens or not usage:
        raise RequestFailed(f"{len(tokens)} tokens of {num_tokens}: {b''.join(other)[-500:]!r}")
    return Answer(sent_s, tuple(arrivals), tuple(tokens), usage)
