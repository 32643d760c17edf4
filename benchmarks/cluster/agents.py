"""Agents' chats against a running cluster in a closed loop, and the figures of the steady part."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster.client import Answer, Client, fresh
from benchmarks.router.workload import ChatShape


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
        start_s, end_s = begun_s[min(2 * self.shape.at_once, len(begun_s) - 1)], begun_s[-1]
        steady = [turn for turn in self.turns if start_s <= turn.ended_s <= end_s]
        return Figures.of(steady, end_s - start_s)


@dataclass(frozen=True)
class Figures:
    """Times in seconds: p50 and p95 of first tokens, p50, p95 and p99 of gaps. `paths`: how many took which way."""

    requests_per_s: float
    cached_share: float
    first_turns_s: tuple[float, ...]
    later_turns_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    paths: dict[str, int]

    @classmethod
    def of(cls, turns: Sequence[Turn], seconds: float) -> Figures:
        """Raises ValueError when the steady part has no turn."""
        if not turns:
            raise ValueError("no turn ended in the steady part: let more chats follow")
        num_prompt = sum(turn.prompt_tokens for turn in turns)
        ways = [str(turn.answer.usage["headrace"]["path"]) for turn in turns]
        return cls(
            requests_per_s=len(turns) / seconds,
            cached_share=sum(turn.answer.cached_tokens for turn in turns) / num_prompt,
            first_turns_s=_percentiles([t.answer.first_token_s for t in turns if t.number == 0], 50, 95),
            later_turns_s=_percentiles([t.answer.first_token_s for t in turns if t.number], 50, 95),
            gaps_s=_percentiles([gap for t in turns for gap in t.answer.gaps_s], 50, 95, 99),
            paths={way: ways.count(way) for way in sorted(set(ways))},
        )


def _percentiles(seconds: Sequence[float], *shares: int) -> tuple[float, ...]:
    if not len(seconds):
        return (float("nan"),) * len(shares)
    return tuple(float(each) for each in np.percentile(seconds, shares))


async def run_chats(clients: Sequence[Client], shape: ChatShape, token_gap_s: float | None, seed: int) -> ChatRun:
    """Lets `shape.at_once` agents have `shape.total` chats, each agent with one client, in turn.

    Raises what `Client.ask` raises.
    """
    run, numbers = ChatRun(shape), iter(range(shape.total))

    async def agent(client: Client) -> None:
        for number in numbers:
            run.begun_s.append(time.perf_counter())
            prompt = fresh(shape.first, (seed << 24) + (number << 8))
            for turn in range(shape.turns):
                answer = await client.ask(prompt, shape.answer, token_gap_s=token_gap_s)
                run.turns.append(Turn(turn, len(prompt), answer))
                prompt = [*prompt, *answer.tokens, *fresh(shape.new, (seed << 24) + (number << 8) + turn + 1)]
                await asyncio.sleep(shape.think_s)

    async with asyncio.TaskGroup() as agents:
        for client in _taking_turns(clients, shape.at_once):
            agents.create_task(agent(client))
    return run


def _taking_turns(clients: Sequence[Client], count: int) -> Iterator[Client]:
    return itertools.islice(itertools.cycle(clients), count)
