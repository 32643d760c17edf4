"""Clients in a process of their own, so that neither their work nor the test's delays what they measure."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.support.patience import PATIENCE_S

Say = Callable[[Any], None]
Clients = Callable[[Say, asyncio.Event], Awaitable[None]]
"""Runs in the new process until the event is set, and says what can be pickled; can be pickled itself."""

_forks = multiprocessing.get_context("forkserver")


@asynccontextmanager
async def client_process(clients: Clients, hear: Callable[[Any], None]) -> AsyncIterator[None]:
    """Within the block the clients run, and `hear` gets what they say. Then they are told to stop, and end in time."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    here, there = _forks.Pipe()
    process = _forks.Process(target=_run, args=(clients, there), daemon=True)
    process.start()
    there.close()

    def listen() -> None:
        try:
            while here.poll():
                hear(here.recv())
        except (EOFError, ConnectionResetError):
            loop.remove_reader(here.fileno())
            ended.set()

    loop.add_reader(here.fileno(), listen)
    try:
        yield
        with suppress(BrokenPipeError):
            here.send("stop")
        async with asyncio.timeout(2 * PATIENCE_S):  # clients may wait as long for an answer
            await ended.wait()
    finally:
        loop.remove_reader(here.fileno())
        here.close()
        if not ended.is_set():
            process.kill()
        await asyncio.to_thread(process.join)
    assert process.exitcode == 0, "the clients' process failed: its traceback is on standard error"


def _run(clients: Clients, pipe: Connection) -> None:
    async def main() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            loop.remove_reader(pipe.fileno())
            stopped.set()

        loop.add_reader(pipe.fileno(), stop)  # told to, or the test is gone
        await clients(pipe.send, stopped)

    asyncio.run(main())
