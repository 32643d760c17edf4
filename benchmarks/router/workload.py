"""Requests that arrive at a simulated cluster: a trace at its own times, or chats that wait for their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.steady_part import SteadyPart
from headrace.cache.types import PrefixKey

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    keys            of the full blocks of the prompt and, where it is known, of the answer
    chat            number of its chat, and of its turn in it from 0 on; in a trace each request is a chat
    first_token_s   objective that it names; None: none
    """

    at_s: float
    num_tokens: int
    answer_tokens: int
    keys: Sequence[PrefixKey]
    chat: int
    turn: int = 0
    first_token_s: float | None = None


class Workload(Protocol):
    """Requests, and those that follow on others."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    def arrivals(self) -> Iterator[Arrival]:
        """The requests that come whatever happens, in order of time."""
        ...

    def after(self, ended: Arrival, now_s: float) -> Arrival | None:
        """The next request of whoever sent `ended`."""
        ...

    def steady_part(self, end_s: float) -> SteadyPart:
        """The time to measure, of a run that ended at `end_s`: without a warm-up and a tail."""
        ...


@dataclass(frozen=True)
class MooncakeTrace:
    """A Mooncake file. An id stands for 512 tokens chained to those before them, so it is their block's key.

    Answers are not in the file: no later prompt finds them.
    """

    name: str
    rows: Sequence[Arrival]
    block_size: int = TRACE_BLOCK_TOKENS

    @classmethod
    def read(cls, path: Path, speed: float = 1.0) -> MooncakeTrace:
        """`speed`: how many times faster than recorded the requests come."""
        with path.open() as lines:
            rows = sorted((json.loads(line) for line in lines), key=lambda row: row["timestamp"])
        arrivals = [
            Arrival(
                at_s=row["timestamp"] / 1000 / speed,
                num_tokens=row["input_length"],
                answer_tokens=row["output_length"],
                keys=[_key(each) for each in row["hash_ids"][: row["input_length"] // TRACE_BLOCK_TOKENS]],
                chat=number,
            )
            for number, row in enumerate(rows)
        ]
        return cls(path.stem.removesuffix("_trace"), arrivals)

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.rows)

    def after(self, ended: Arrival, now_s: float) -> Arrival | None:
        return None

    def steady_part(self, end_s: float) -> SteadyPart:
        return SteadyPart(0.0, end_s)


@dataclass(frozen=True)
class ChatShape:
    """Agents' chats: a long first turn, then short ones.

    at_once               chats at any time
    first                 tokens of the first turn's prompt
    new                   tokens that each later turn adds to what was said
    answer                tokens of each answer
    turns                 of a chat
    total                 chats in all
    think_s               from an answer's end to the next turn's arrival at the router
    later_first_token_s   objective that each turn but the first one names; None: none
    """

    at_once: int = 48
    first: int = 16384
    new: int = 1024
    answer: int = 128
    turns: int = 8
    total: int = 480
    think_s: float = 0.005
    later_first_token_s: float | None = None

    @property
    def last_tokens(self) -> int:
        """Tokens of a chat when its last answer ends."""
        return self.first + (self.turns - 1) * (self.new + self.answer) + self.answer

    def first_token_s(self, turn: int) -> float | None:
        """The objective that a turn names; they are counted from 0 on."""
        return self.later_first_token_s if turn else None


class Chats:
    """A closed loop: a turn is sent when the one before it has been answered, a chat begins when another has ended."""

    name = "chats"

    def __init__(self, shape: ChatShape, block_size: int) -> None:
        self.block_size = block_size
        self._shape = shape
        self._begun_s: list[float] = []
        self._keys: dict[int, list[PrefixKey]] = {}

    def arrivals(self) -> Iterator[Arrival]:
        first_turns = (self._first_turn(0.0) for _ in range(self._shape.at_once))
        return (arrival for arrival in first_turns if arrival is not None)

    def after(self, ended: Arrival, now_s: float) -> Arrival | None:
        shape = self._shape
        if ended.turn + 1 < shape.turns:
            num_tokens = ended.num_tokens + ended.answer_tokens + shape.new
            return self._turn(now_s + shape.think_s, ended.chat, ended.turn + 1, num_tokens)
        del self._keys[ended.chat]
        return self._first_turn(now_s)

    def steady_part(self, end_s: float) -> SteadyPart:
        """From when twice as many chats have begun as run at once, until the last one has."""
        begun_s = self._begun_s
        return SteadyPart(begun_s[min(2 * self._shape.at_once, len(begun_s) - 1)], begun_s[-1])

    def _first_turn(self, now_s: float) -> Arrival | None:
        chat = len(self._begun_s)
        if chat == self._shape.total:
            return None
        self._begun_s.append(now_s)
        self._keys[chat] = []
        return self._turn(now_s, chat, 0, self._shape.first)

    def _turn(self, now_s: float, chat: int, turn: int, num_tokens: int) -> Arrival:
        keys = self._keys[chat]
        for index in range(len(keys), (num_tokens + self._shape.answer) // self.block_size):
            keys.append(_key(chat << 32 | index))
        first_token_s = self._shape.first_token_s(turn)
        return Arrival(now_s, num_tokens, self._shape.answer, tuple(keys), chat, turn, first_token_s)


def _key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(8, "little"))
