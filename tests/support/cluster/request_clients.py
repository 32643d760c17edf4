"""Clients that ask for short answers, as many as possible, or that leave soon after they asked.

They run in a process of their own (`client_process`).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.cluster.client_process import Say
from tests.support.patience import PATIENCE_S

AT_ONCE = 4
VOCABULARY = (5, 4000)
LEAVE_WITHIN_S = 0.3
STORM_AT_ONCE = 50


@dataclass(frozen=True)
class Progress:
    """num_asked   so far
    errors      since the last time: statuses that are not 200, and what httpx raised
    """

    num_asked: int
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Storm:
    """Requests a second before it and after it; errors of requests that nobody aborted."""

    before: float
    after: float
    errors: tuple[str, ...] = ()


async def request_clients(
    url: str, num_requests: int, say_each: int, seed: int, say: Say, stopped: asyncio.Event
) -> None:
    """So many requests, AT_ONCE of them in flight; says `Progress` after each `say_each`."""
    dice = random.Random(seed)
    async with _http(url) as http:
        for first in range(0, num_requests, say_each):
            count = min(say_each, num_requests - first)
            errors = await _answered(http, [_short(dice) for _ in range(count)])
            say(Progress(first + count, tuple(errors)))
            if stopped.is_set():
                return


async def abort_storms(
    url: str, num_storms: int, num_aborted: int, num_timed: int, seed: int, say: Say, stopped: asyncio.Event
) -> None:
    """Says a `Storm` for each: the requests after it begin when its last client has left."""
    dice = random.Random(seed)
    async with _http(url) as http:
        for _ in range(num_storms):
            before, errors = await _throughput(http, dice, num_timed)
            gate = asyncio.Semaphore(STORM_AT_ONCE)
            await asyncio.gather(*(_leaves(http, gate, dice) for _ in range(num_aborted)))
            after, more_errors = await _throughput(http, dice, num_timed)
            say(Storm(before, after, tuple(errors + more_errors)))
            await asyncio.sleep(1.0)  # what a storm left behind would slow the first half of the next one's figures
            if stopped.is_set():
                return


@asynccontextmanager
async def _http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        yield http


async def _throughput(http: httpx.AsyncClient, dice: random.Random, count: int) -> tuple[float, list[str]]:
    bodies = [_body(_prompt(dice, 200), 16) for _ in range(count)]
    began_s = time.monotonic()
    errors = await _answered(http, bodies)
    return count / (time.monotonic() - began_s), errors


async def _answered(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[str]:
    """What went wrong with them, AT_ONCE in flight."""
    waiting, errors = iter(bodies), []

    async def client() -> None:
        for body in waiting:
            try:
                reply = await http.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                errors.append(type(error).__name__)
                continue
            if reply.status_code != 200:
                errors.append(f"{reply.status_code} {reply.text[:200]}")

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return errors


async def _leaves(http: httpx.AsyncClient, gate: asyncio.Semaphore, dice: random.Random) -> None:
    body = _body(_prompt(dice, 200), 200) | {"stream": dice.random() < 0.5}
    async with gate:
        try:
            async with asyncio.timeout(dice.uniform(0.0, LEAVE_WITHIN_S)):
                await http.post("/v1/completions", json=body)
        except (TimeoutError, httpx.HTTPError):
            pass


def _short(dice: random.Random) -> dict[str, Any]:
    """One of few beginnings, and an end of its own: caches are hit, and filled."""
    beginning = _prompt(random.Random(dice.randrange(8)), 16)
    return _body(beginning + _prompt(dice, dice.randint(2, 24)), 2)


def _prompt(dice: random.Random, num_tokens: int) -> list[int]:
    return [dice.randrange(*VOCABULARY) for _ in range(num_tokens)]


def _body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
