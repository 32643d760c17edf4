"""Worker processes for parsing: bounded in number, in what waits for them, and in what one request may take."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from http import HTTPStatus
from typing import Any, TypeVar

from router.errors import ApiError, internal_error
from router.parsing.body_parser import ParseJob
from router.parsing.messages import LENGTH, ParseAnswer, WorkerSettings, frame
from router.parsing.turns import Turns

T = TypeVar("T")

START_TIMEOUT_S = 60.0
GRACE_S = 0.25
"""A worker whose client left may finish within this time: starting another one costs more."""

log = logging.getLogger(__name__)


class WorkerPool:
    """Parses bodies in `size` processes, each started when it is first needed and shared fairly by clients (`Turns`).
    `close` before the loop ends."""

    def __init__(self, settings: WorkerSettings, size: int, max_parsing: int) -> None:
        self._settings = settings
        self._turns = Turns(size, max_parsing)
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    async def parse(self, job: ParseJob[T], client: str) -> T:
        """Parses in a worker. Raises the body's own ApiError; 429 if too many wait; 413 if the body takes too much.

        Cancelling ends the work: the worker has `GRACE_S` to finish, then it is killed.
        """
        await self._turns.take(client)
        asking = asyncio.create_task(self._ask(job))
        try:
            return await asyncio.shield(asking)
        finally:
            leaving = asyncio.create_task(self._leave(asking, client))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, asking: asyncio.Task[Any], client: str) -> None:
        """Ends the work that nobody awaits any more, then gives its turn to the next."""
        await asyncio.wait({asking}, timeout=GRACE_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        self._turns.give_back(client)

    async def _ask(self, job: ParseJob[T]) -> T:
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            answer = await worker.ask(job)
        except BaseException as error:
            self._workers.discard(worker)
            cause = await worker.end()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise self._too_costly(cause) from None
            raise
        if answer.is_spent:
            self._workers.discard(worker)
            await worker.end()
        else:
            self._idle.append(worker)
        if isinstance(answer.result, ApiError):
            raise answer.result
        result: T = answer.result
        return result

    async def _start(self) -> Worker:
        worker = Worker()
        self._workers.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.start(self._settings)
        except BaseException as error:
            self._workers.discard(worker)
            status = await worker.end()
            if isinstance(error, asyncio.CancelledError):
                raise
            log.error("a process that parses requests did not start (exit status %d): %r", status, error)
            raise internal_error() from error
        return worker

    def _too_costly(self, exit_status: int) -> ApiError:
        settings = self._settings
        if exit_status == -signal.SIGPROF:
            limit = f"took more than {settings.cpu_s:g} s of processor time (parse_cpu_s)"
        else:
            limit = f"needs more than {settings.memory_bytes} bytes of memory (parse_memory_bytes)"
            log.warning("a process that parsed a request ended with status %d", exit_status)
        message = f"reading the request {limit}; shorten it"
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="parsing_too_costly")

    async def close(self) -> None:
        """Kills all workers."""
        workers, self._workers = self._workers, set()
        await asyncio.gather(*(worker.end() for worker in workers), *self._leaving, return_exceptions=True)


class Worker:
    """One worker process."""

    _process: subprocess.Popen[bytes] | None = None

    async def start(self, settings: WorkerSettings) -> None:
        """Starts the process and waits until it has loaded its model."""
        here, there = socket.socketpair()
        with there:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "router.parsing.worker"]
            self._process = subprocess.Popen(command, stdin=there.fileno(), env=environment)
        here.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=here)
        await self._exchange(settings)

    async def ask(self, job: ParseJob[Any]) -> ParseAnswer:
        """One job's answer; raises IncompleteReadError or ConnectionError if the process ends."""
        answer = await self._exchange(job)
        assert isinstance(answer, ParseAnswer)
        return answer

    async def _exchange(self, message: object) -> object:
        self._writer.write(frame(message))
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    async def end(self) -> int:
        """Kills the process if it still runs, and returns its exit status."""
        if self._process is None:
            return 0
        if hasattr(self, "_writer"):
            self._writer.close()
        # One that ends by itself has closed its socket a moment ago: its own status tells the cause.
        try:
            return await asyncio.to_thread(self._process.wait, 0.05)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)
