"""Agents' chats against a running cluster in a closed loop, and the figures of the steady part."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster.client import Answer, Client, fresh
from benchmarks.router.workload import ChatShape
from benchmarks.steady_part import SteadyPart
from router.routing.plan import Objectives

PROCESSES = 12
START_S = 5.0  # until all processes have started


@dataclass(frozen=True)
class Turn:
    """One answered turn: its number in the chat, from 0 on, and when it was answered in full (perf_counter)."""

    number: int
    prompt_tokens: int
    answer: Answer

    @property
    def ended_s(self) -> float:
        return self.answer.arrivals[-1]


@dataclass
class ChatRun:
    """The turns of all chats, and when each chat began (perf_counter)."""

    shape: ChatShape
    turns: list[Turn] = field(default_factory=list)
    begun_s: list[float] = field(default_factory=list)

    def figures(self) -> Figures:
        """Figures of the steady part: from the third round of chats until the last one begins."""
        begun_s = sorted(self.begun_s)
        return Figures.of(self.turns, SteadyPart(begun_s[min(2 * self.shape.at_once, len(begun_s) - 1)], begun_s[-1]))


@dataclass(frozen=True)
class Figures:
    """Figures of the steady part. Times in seconds: p50 and p95 of first tokens, p50, p95 and p99 of gaps.

    requests_per_s, cached_share   count each turn by its share of time in the steady part
    the times, and paths           are those of the turns that ended in it; `paths`: how many took which way
    """

    requests_per_s: float
    cached_share: float
    first_turns_s: tuple[float, ...]
    later_turns_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    paths: dict[str, int]

    @classmethod
    def of(cls, turns: Sequence[Turn], part: SteadyPart) -> Figures:
        """Raises ValueError when no turn ended in the steady part."""
        ended = [turn for turn in turns if part.start_s <= turn.ended_s <= part.end_s]
        if not ended or not part.seconds:
            raise ValueError("no turn ended in the steady part: let more chats follow")
        shares = [part.share_of(turn.answer.sent_s, turn.ended_s) for turn in turns]
        num_prompt, num_cached = (
            sum(share * tokens for share, tokens in zip(shares, each, strict=True))
            for each in ((t.prompt_tokens for t in turns), (t.answer.cached_tokens for t in turns))
        )
        ways = [str(turn.answer.usage["headrace"]["path"]) for turn in ended]
        return cls(
            requests_per_s=sum(shares) / part.seconds,
            cached_share=num_cached / num_prompt,
            first_turns_s=_percentiles([t.answer.first_token_s for t in ended if t.number == 0], 50, 95),
            later_turns_s=_percentiles([t.answer.first_token_s for t in ended if t.number], 50, 95),
            gaps_s=_percentiles([gap for t in ended for gap in t.answer.gaps_s], 50, 95, 99),
            paths={way: ways.count(way) for way in sorted(set(ways))},
        )


def _percentiles(seconds: Sequence[float], *shares: int) -> tuple[float, ...]:
    if not len(seconds):
        return (float("nan"),) * len(shares)
    return tuple(float(each) for each in np.percentile(seconds, shares))


@dataclass(frozen=True)
class _Part:
    """The agents of one process: `urls`, the router that each asks, and `numbers`, the chats that they have.

    begin_s   when they begin, all processes at once (perf_counter, which these share)
    """

    urls: Sequence[str]
    numbers: range
    shape: ChatShape
    token_gap_s: float | None
    seed: int
    begin_s: float
    deadline_s: float


def run_chats(
    pool: Executor, urls: Sequence[str], shape: ChatShape, token_gap_s: float | None, seed: int, deadline_s: float
) -> ChatRun:
    """Lets `shape.at_once` agents have `shape.total` chats, each agent with one of the routers, in turn.

    In PROCESSES processes: what one agent takes to write its prompts must not look like another's gap.
    Raises what `Client.ask` raises.
    """
    begin_s = time.perf_counter() + START_S
    num_parts = min(PROCESSES, shape.at_once)
    agents = [*itertools.islice(itertools.cycle(urls), shape.at_once)]

    def part(number: int) -> _Part:
        chats = range(number, shape.total, num_parts)
        return _Part(agents[number::num_parts], chats, shape, token_gap_s, seed, begin_s, deadline_s)

    run = ChatRun(shape)
    for done in pool.map(_have_chats, map(part, range(num_parts))):
        run.turns += done.turns
        run.begun_s += done.begun_s
    return run


def _have_chats(part: _Part) -> ChatRun:
    return asyncio.run(_run_part(part))


async def _run_part(part: _Part) -> ChatRun:
    shape, run, numbers = part.shape, ChatRun(part.shape), iter(part.numbers)

    async def agent(client: Client) -> None:
        for number in numbers:
            run.begun_s.append(time.perf_counter())
            prompt = fresh(shape.first, (part.seed << 24) + (number << 8))
            for turn in range(shape.turns):
                objectives = Objectives(shape.first_token_s(turn), part.token_gap_s)
                answer = await client.ask(prompt, shape.answer, objectives=objectives)
                run.turns.append(Turn(turn, len(prompt), answer))
                prompt = [*prompt, *answer.tokens, *fresh(shape.new, (part.seed << 24) + (number << 8) + turn + 1)]
                await asyncio.sleep(shape.think_s)

    await asyncio.sleep(part.begin_s - time.perf_counter())
    async with asyncio.TaskGroup() as agents:
        for url in part.urls:
            agents.create_task(agent(Client(url, part.deadline_s, timeout_s=300.0)))
    return run
