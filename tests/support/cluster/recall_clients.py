"""Clients that ask what they know the answer to, as a stream, and note when its parts came.

They run in a process of their own (`client_process`) and say an `Answer` for each question. A client that meets an
error asks the same again, under the same request id, as client libraries do, until its patience ends.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from tests.support.cluster.client_process import Say
from tests.support.patience import PATIENCE_S

ASK_TIMEOUT_S = PATIENCE_S
PAUSE_S = 0.1
"""Before a client asks again."""


@dataclass(frozen=True)
class Question:
    """tokens   the undisturbed cluster's answer to `body`, posted to `path`"""

    path: str
    body: dict[str, Any]
    tokens: list[int]


@dataclass(frozen=True)
class Habits:
    """num_clients    of them ask at a time
    think_s        between an answer and the next question: drawn from half of it to one and a half
    patience_s     how long a client that met an error asks again; 0: not at all
    salted_share   of the questions, those that share no cache with anybody: their whole prompt is computed
    tenant_header  in which a gateway names each client as a tenant of its own; empty: it names none
    """

    num_clients: int = 4
    think_s: float = 0.0
    patience_s: float = 0.0
    salted_share: float = 0.5
    tenant_header: str = ""


@dataclass(frozen=True)
class Answer:
    """Times are in seconds of the clock that all processes share, monotonic.

    first_token_s   when it came; None without one
    gaps_s          between parts of the answer, of a token or more each
    is_right        false for a wrong one, and for a question that was given up after `errors`
    wrong           what is wrong with it; empty if it is right, or was given up
    errors          met on the way, the same in a row once
    """

    asked_s: float
    ended_s: float
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    is_right: bool = False
    wrong: str = ""
    errors: tuple[str, ...] = ()
    migrated: bool = False


class AskFailed(Exception):
    """An error instead of an answer, or in its midst."""


@dataclass
class _Stream:
    """What has come of one answer."""

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.is_done = True
            return
        data = json.loads(line.removeprefix("data: "))
        if "error" in data:
            raise AskFailed(f"in the stream: {data['error']['message'][:120]}")
        self.usage = data.get("usage") or self.usage
        for choice in data["choices"]:
            if tokens := choice.get("token_ids"):
                self.tokens += tokens
                self.at_s.append(time.monotonic())


async def recall_clients(
    url: str, questions: Sequence[Question], habits: Habits, seed: int, say: Say, stopped: asyncio.Event
) -> None:
    """Until `stopped`; then each still gets the answer that it waits for."""
    names = [f"chat {number}" for number in range(habits.num_clients)]
    await asyncio.gather(*(_client(url, name, questions, habits, seed, say, stopped) for name in names))


async def _client(
    url: str,
    name: str,
    questions: Sequence[Question],
    habits: Habits,
    seed: int,
    say: Say,
    stopped: asyncio.Event,
) -> None:
    dice = random.Random(f"{seed} {name}")  # its questions do not depend on how fast the others are answered
    if habits.think_s:
        await _until(stopped, dice.uniform(0, habits.think_s))  # they do not begin all at once
    headers = {habits.tenant_header: name} if habits.tenant_header else {}
    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S, headers=headers, verify=False) as http:
        while not stopped.is_set():
            question = dice.choice(questions)
            salt = uuid4().hex if dice.random() < habits.salted_share else ""
            say(await _ask_until_answered(http, question, salt, f"recall-{uuid4().hex}", habits.patience_s))
            if habits.think_s:
                await _until(stopped, habits.think_s * dice.uniform(0.5, 1.5))


async def _until(stopped: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await stopped.wait()
    except TimeoutError:
        pass


async def _ask_until_answered(
    http: httpx.AsyncClient, question: Question, salt: str, request_id: str, patience_s: float
) -> Answer:
    asked_s = time.monotonic()
    errors: list[str] = []
    while True:
        try:
            stream = await _ask(http, question, salt, request_id)
        except (httpx.HTTPError, AskFailed) as error:
            what = str(error) if isinstance(error, AskFailed) else type(error).__name__
            if errors[-1:] != [what]:
                errors.append(what)
            ended_s = time.monotonic()
            if ended_s >= asked_s + patience_s:
                return Answer(asked_s, ended_s, errors=tuple(errors))
            await asyncio.sleep(PAUSE_S)
            continue
        is_right = stream.tokens == question.tokens
        return Answer(
            asked_s,
            time.monotonic(),
            stream.at_s[0] if stream.at_s else None,
            tuple(after_s - before_s for before_s, after_s in zip(stream.at_s, stream.at_s[1:], strict=False)),
            is_right,
            "" if is_right else f"{stream.tokens} instead of {question.tokens}: {stream.usage}",
            tuple(errors),
            stream.usage.get("headrace", {}).get("migrations", 0) > 0,
        )


async def _ask(http: httpx.AsyncClient, question: Question, salt: str, request_id: str) -> _Stream:
    body = question.body | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "headrace": {"report": True, "salt": salt},
    }
    stream = _Stream()
    async with http.stream("POST", question.path, json=body, headers={"x-request-id": request_id}) as reply:
        if reply.status_code != 200:
            await reply.aread()
            raise AskFailed(f"{reply.status_code} {_message(reply)}")
        async for line in reply.aiter_lines():
            stream.take(line)
    if not stream.is_done:
        raise AskFailed("the stream ended without its end")
    return stream


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])[:120]
    except (ValueError, KeyError):
        return reply.text[:120]
