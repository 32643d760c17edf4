"""The base of the Ray actors: a server in an actor's event loop, from its start to the end of its process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import ray
from ray.actor import ActorClass

from headrace.config import ConfigError
from headrace.host_process import log_to_stderr, take_niceness
from headrace.pauses import keep_pauses_short

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0


class Server(Protocol):
    """A router or a node: see RouterServer, NodeServer."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def wait_closed(self) -> None: ...


class ServerActor:
    """Runs a server in the actor's event loop. The constructor returns once the server serves, or cannot start.

    What a user can mend (`foreseen`, ConfigError) is raised by `serving`, so that it reaches the supervisor as one
    message: Ray prints the traceback of whatever a constructor raises.

    A crash of the server ends the process, and so does a restart that fails; SIGTERM ends it once the server has
    stopped, with the requests in flight ended or moved. Ray then starts the actor again, in another process.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # once it serves

    def __new__(cls, *arguments: object) -> ServerActor:
        """Handles SIGTERM in a worker. Ray calls this, unlike all other methods, in the main thread.

        Ray's own handler, which is there by then, raises SystemExit: Python ends below running threads, and aborts.
        """
        actor = super().__new__(cls)
        if not isinstance(actor, ActorClass):  # the supervisor's description of the actor is made here, too
            signal.signal(signal.SIGTERM, actor._on_sigterm)
        return actor

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, name: str, niceness: int, make_server: Callable[[], Any], foreseen: tuple[type[Exception], ...]
    ) -> None:
        log_to_stderr()
        take_niceness(niceness)
        self._name = name
        self._refusal: Exception | None = None
        try:
            self._server = make_server()
            await self._server.start()
        except Exception as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                await self._exit_to_restart("did not start again")  # raising would end the actor for good
            if not isinstance(error, (*foreseen, ConfigError)):
                raise
            self._refusal = error
            return
        keep_pauses_short()
        self._watch = asyncio.create_task(self._exit_when_crashed())
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return self._name  # the prefix of this actor's lines in the supervisor's log

    def serving(self) -> Any:
        """The server. Raises the foreseen error with which it did not start."""
        if self._refusal is not None:
            raise self._refusal
        return self._server

    async def stop(self) -> None:
        """Stops the server, requests in flight first; the process stays until Ray kills it."""
        self._watch.cancel()
        await self._server.stop()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None:
            os._exit(1)  # it does not serve yet
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = self._draining or asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("%s stops: SIGTERM", self._name)
        try:
            await self.stop()
        except Exception:
            log.exception("%s did not stop cleanly", self._name)
        os._exit(0)

    async def _exit_when_crashed(self) -> None:
        try:
            await self._server.wait_closed()
        except Exception:
            await self._exit_to_restart("crashed")

    async def _exit_to_restart(self, what: str) -> None:
        log.exception("%s %s: this process ends, Ray starts another", self._name, what)
        await asyncio.sleep(RESTART_PAUSE_S)  # a permanent fault must not become a busy loop
        os._exit(1)
