"""Clients that are slow, rude or greedy, each in its own way, over and over; what the router answers them is counted.

They run in a process of their own (`client_process`), come from an address of their own where the router listens on
loopback, and as if through a gateway that names their tenant in TENANT_HEADER, one for each kind. They say `(kind,
outcome)` for each attempt: a status code, or how the connection ended. At last they say what processor time they took
themselves.
"""

import asyncio
import json
import random
import select
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from tests.support.cluster.client_process import Say

TENANT_HEADER = "x-tenant"
LOOPBACK, HOSTILE_ADDRESS = "127.0.0.1", "127.0.0.2"
PATIENCE_S = 120.0
"""Of clients that wait for an answer."""
HELD_S = (5.0, 30.0)
"""How long they keep what they hold: connections that say nothing, answers that they do not read."""
PAUSE_S = (0.1, 1.0)
"""After each attempt. A refused client does not wait as long as it is told to; and all of them share the machine's
processors with what they attack, so that they must not be too eager."""
IDLE_CONNECTIONS = 100
VOCABULARY = (5, 4000)


@dataclass(frozen=True)
class Target:
    """long_prompt   tokens of the long prompts
    tenant        whose clients these are
    """

    host: str
    port: int
    long_prompt: int
    tenant: str = "hostile"


class Connection:
    """One HTTP connection, by hand: it may send half a request, and need not read."""

    def __init__(self, sock: socket.socket, tenant: str) -> None:
        self._sock = sock
        self._tenant = tenant
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read stays at the router
        if target.host == LOOPBACK:
            sock.bind((HOSTILE_ADDRESS, 0))
        connection = cls(sock, target.tenant)
        try:
            await connection._loop.sock_connect(sock, (target.host, target.port))
        except OSError:
            sock.close()
            raise
        return connection

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def post(self, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        await self.begin(len(data))
        await self.send(data)

    async def begin(self, num_bytes: int) -> None:
        """The head of a request whose body has so many bytes."""
        await self.send(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{TENANT_HEADER}: {self._tenant}\r\n"
            f"Content-Length: {num_bytes}\r\n\r\n".encode()
        )

    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        """Empty when the router has closed the connection."""
        return await self._loop.sock_recv(self._sock, max_bytes)

    async def status(self) -> str:
        """Of the answer, without the rest of it."""
        return (await self.read())[9:12].decode() or "closed"

    async def all_of_it(self) -> str:
        """The status, once the answer is complete; the request asked to close the connection."""
        status = await self.status()
        while await self.read():
            pass
        return status

    @property
    def is_closed(self) -> bool:
        """True once the router has closed it, whether or not anything was read."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    async def closed_within(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while not self.is_closed:
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(0.2)
        return True

    def close(self) -> None:
        self._sock.close()


Attempt = Callable[[Target, random.Random], Awaitable[str]]


def random_prompt(dice: random.Random, num_tokens: int) -> list[int]:
    return [dice.randrange(*VOCABULARY) for _ in range(num_tokens)]


# ---------------------------------------------------------------- slow and rude ones


async def reads_nothing(target: Target, dice: random.Random) -> str:
    with closing(await Connection.open(target)) as connection:
        await connection.post(long_answer(dice))
        return "dropped" if await connection.closed_within(dice.uniform(*HELD_S)) else "left"


async def reads_a_byte_a_second(target: Target, dice: random.Random) -> str:
    with closing(await Connection.open(target)) as connection:
        await connection.post(long_answer(dice))
        for _ in range(int(dice.uniform(*HELD_S))):
            if not await connection.read(1):
                return "dropped"
            await asyncio.sleep(1.0)
        return "left"


def long_answer(dice: random.Random) -> dict[str, Any]:
    prompt = random_prompt(dice, 50)
    return {"prompt": prompt, "max_tokens": 2000, "n": 2, "logprobs": 5, "stream": True, "ignore_eos": True}


async def breaks_its_upload(target: Target, dice: random.Random) -> str:
    with closing(await Connection.open(target)) as connection:
        await connection.begin(1 << 20)
        await connection.send(b'{"prompt": "' + b"x" * dice.randrange(1 << 18))
        return "left"


async def never_sends_its_body(target: Target, dice: random.Random) -> str:
    with closing(await Connection.open(target)) as connection:
        await connection.begin(1000)
        await connection.send(b"{")
        if not await connection.closed_within(dice.uniform(*HELD_S)):
            return "left"
        return await connection.status()


async def sends_huge_headers(target: Target, dice: random.Random) -> str:
    with closing(await Connection.open(target)) as connection:
        await connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        for number in range(256):
            await connection.send(b"x-%d: %b\r\n" % (number, b"a" * 8000))
        await connection.send(b"\r\n")
        return await connection.all_of_it()


async def opens_connections(target: Target, dice: random.Random) -> str:
    connections = []
    try:
        for _ in range(IDLE_CONNECTIONS):
            connections.append(await Connection.open(target))
        await connections[0].closed_within(dice.uniform(*HELD_S))
        return f"{sum(connection.is_closed for connection in connections)} of {IDLE_CONNECTIONS} closed"
    finally:
        for connection in connections:
            connection.close()


async def aborts(target: Target, dice: random.Random) -> str:
    body = {"prompt": random_prompt(dice, 300), "max_tokens": 100, "stream": dice.random() < 0.5, "ignore_eos": True}
    with closing(await Connection.open(target)) as connection:
        await connection.post(body)
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        return "left"


# ---------------------------------------------------------------- greedy ones


async def wants_sixteen_choices(target: Target, dice: random.Random) -> str:
    return await ask(target, {"prompt": random_prompt(dice, 300), "max_tokens": 16, "n": 16, "ignore_eos": True})


async def wants_penalties(target: Target, dice: random.Random) -> str:
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    prompt = random_prompt(dice, target.long_prompt)
    return await ask(target, {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, **penalties})


async def wants_prompt_logprobs(target: Target, dice: random.Random) -> str:
    return await ask(target, {"prompt": random_prompt(dice, 4000), "max_tokens": 1, "echo": True, "logprobs": 20})


async def sends_a_giant_text(target: Target, dice: random.Random) -> str:
    return await ask(target, {"prompt": str(dice.randrange(10)) * (4 << 20), "max_tokens": 1})


async def overloads(target: Target, dice: random.Random) -> str:
    return await ask(target, {"prompt": random_prompt(dice, 300), "max_tokens": 16, "ignore_eos": True})


async def ask(target: Target, body: Mapping[str, Any]) -> str:
    async with asyncio.timeout(PATIENCE_S):
        with closing(await Connection.open(target)) as connection:
            await connection.post(body)
            return await connection.all_of_it()


KINDS: dict[str, Attempt] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        reads_nothing,
        reads_a_byte_a_second,
        breaks_its_upload,
        never_sends_its_body,
        sends_huge_headers,
        opens_connections,
        aborts,
        wants_sixteen_choices,
        wants_penalties,
        wants_prompt_logprobs,
        sends_a_giant_text,
        overloads,
    )
}


async def hostile_clients(
    target: Target, crowd: Mapping[str, int], seed: int, say: Say, stopped: asyncio.Event
) -> None:
    """So many clients of each kind in `crowd`, until `stopped`: then they drop whatever they are doing."""
    dice = random.Random(seed)
    crowds = [kind for kind, count in crowd.items() for _ in range(count)]
    clients = [asyncio.create_task(_keep_on(kind, target, random.Random(dice.random()), say)) for kind in crowds]
    ending = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait([ending, *clients], return_when=asyncio.FIRST_COMPLETED)
    for task in (ending, *clients):
        task.cancel()
    await asyncio.gather(ending, *clients, return_exceptions=True)
    for task in done - {ending}:
        task.result()  # a client that ended before the others has a fault of its own
    say(("processor time", f"{time.process_time():.0f} s"))


async def _keep_on(kind: str, target: Target, dice: random.Random, say: Say) -> None:
    target = replace(target, tenant=kind)
    while True:
        try:
            outcome = await KINDS[kind](target, dice)
        except (OSError, TimeoutError) as error:
            outcome = type(error).__name__
        say((kind, outcome))
        await asyncio.sleep(dice.uniform(*PAUSE_S))
