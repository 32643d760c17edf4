"""One answer streamed over HTTP, as a client sees it: when each token arrived. A bare socket, to cost little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any
from urllib.parse import urlsplit

LINE_LIMIT = 1 << 20


class RequestFailed(RuntimeError):
    """Not answered in full."""


@dataclass(frozen=True)
class Answer:
    """Times are of perf_counter; `arrivals` has one a token."""

    sent_s: float
    arrivals: tuple[float, ...]
    tokens: tuple[int, ...]
    usage: dict[str, Any]

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens, from the second one on; those that came in one event share its wait."""
        gaps: list[float] = []
        for (earlier, _), (later, together) in pairwise((at, len([*group])) for at, group in groupby(self.arrivals)):
            gaps += [(later - earlier) / together] * together
        return gaps

    @property
    def cached_tokens(self) -> int:
        """What no node had to compute."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def body_of(prompt: Sequence[int], num_tokens: int, checkpoint_at: Sequence[int] = ()) -> bytes:
    """Greedy, end of sequence ignored, with a report."""
    return json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "headrace": {"report": True, "checkpoint_at": list(checkpoint_at)},
        }
    ).encode()


async def stream(url: str, body: bytes, num_tokens: int, timeout_s: float) -> Answer:
    """Raises RequestFailed, TimeoutError, OSError."""
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
