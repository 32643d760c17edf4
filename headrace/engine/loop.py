"""The engine's thread: runs commands between steps, steps while there is work, and sleeps otherwise.

Everything that touches pools or cache memory happens in this thread, so nothing in headrace/engine/ or headrace/cache/
needs a lock. The event loop posts commands and receives events, with one wake-up for all events of a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.engine.engine import Engine
from headrace.engine.failures import StepFailed, first_line, log_summary
from headrace.engine.sequence import Failed

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_CHECK_S = 1.0  # the longest that an idle engine waits for a command before it checks its pools
LOOK_S = 0.001  # so often an engine that leaves its next step open looks whether the device is done


class EngineLost(RuntimeError):
    """The engine's thread has ended; the node must be restarted."""


class EngineLoop:
    """Runs one engine in a thread of its own, beside one asyncio event loop.

    clock      the engine's
    on_crash   called in the event loop when a step raises, or when the pools, checked each time the engine falls idle,
               are corrupt: the node must end, because the cache's contents are unknown
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], on_crash: Callable[[BaseException], None]):
        self.engine = engine
        self._clock = clock
        self._on_crash = on_crash
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._awaited: set[asyncio.Future[Any]] = set()  # results that callers wait for; the event loop's own
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self.turns = 0
        """Turns of the thread so far. An idle one has a turn each IDLE_CHECK_S."""
        self._is_checked = False
        """True if no command has run since the last check of the pools."""

    def start(self) -> None:
        self._thread.start()

    async def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step in progress. Raises TimeoutError if that takes too long."""

        def end() -> None:
            self._stopping = True

        self._commands.put(end)
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s} s")
        self._lose(EngineLost("the engine has stopped: the node takes no more requests"))

    def deliver(self, callback: Callable[..., None], *args: Any) -> None:
        """From the engine's thread: calls `callback(*args)` in the event loop, in order, after this step."""
        self._events.append((callback, args))

    def post(self, command: Callable[[], object]) -> None:
        """Calls `command()` in the engine's thread between two steps."""
        self._commands.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """The result of `command()`, called in the engine's thread between two steps; its error is raised here."""
        if not self._thread.is_alive():
            raise EngineLost("the engine has stopped: the node takes no more requests")
        future: asyncio.Future[T] = self._loop.create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                self.deliver(_set_exception, future, error)
            else:
                self.deliver(_set_result, future, result)

        self._commands.put(run)
        return await future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turns += 1
                self._drain(wait=not self.engine.has_work)
                self._leave_step_open()
                self._admit(self.engine.host_share_s)
                self.engine.step()
                self._send_tokens()
        except BaseException as error:
            log.exception("the engine's step failed; the node ends")
            try:
                self._fail_all(first_line(error))
                self.flush()
            finally:  # whatever the engine has come to: a node without this thread must end
                self._loop.call_soon_threadsafe(self._crashed, error)

    def _fail_all(self, cause: str) -> None:
        """Ends every request: those of the step that raised with its error, because one of them may have caused it."""
        suspects = self.engine.suspects
        for sequence in suspects:
            log.error("in the step that failed: request %s", log_summary(sequence.request))
        for sequence in self.engine.sequences:
            error = StepFailed(cause) if sequence in suspects else EngineLost(f"the engine has crashed: {cause}")
            sequence.job.on_event(Failed(error))

    def _crashed(self, error: BaseException) -> None:
        self._lose(EngineLost(f"the engine has crashed: {error}"))
        self._on_crash(error)

    def _lose(self, error: EngineLost) -> None:
        """Fails the calls that are still awaited: their commands will not run."""
        for future in list(self._awaited):
            _set_exception(future, error)

    def _drain(self, *, wait: bool) -> None:
        """Runs the queued commands, for no longer than beside the step in flight; the rest follows after the next one.

        With `wait`, first sleeps until there is one or a deadline passes.
        """
        if wait:
            self.flush()
            deadline_s = self.engine.next_deadline_s()
            timeout_s = IDLE_CHECK_S if deadline_s is None else max(0.0, deadline_s - self._clock())
            try:
                command = self._commands.get(timeout=min(timeout_s, IDLE_CHECK_S))
            except queue.Empty:
                self._check_once()
                return
            self._is_checked = False
            command()
        self._run_commands(self.engine.host_share_s)

    def _run_commands(self, within_s: float) -> None:
        """Runs the queued commands; no more of them once it took so long."""
        until_s = self._clock() + within_s
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return
            if self._clock() >= until_s:
                return

    def _admit(self, within_s: float) -> None:
        self.engine.admit(within_s)
        self.flush()  # admissions and packed messages need not wait until the step is over

    def _leave_step_open(self) -> None:
        """Runs commands as they come while the device has enough to do, and admits, so that the next step has both."""
        has_run = True  # some may have run before this
        while not self._stopping and (spare_s := self.engine.spare_s) > 0:
            if has_run or self.engine.is_admitting:
                self._admit(min(spare_s, self.engine.host_share_s))
                has_run = False
                continue
            try:
                command = self._commands.get(timeout=min(spare_s, LOOK_S))
            except queue.Empty:
                continue
            command()
            self._run_commands(min(self.engine.spare_s, self.engine.host_share_s))
            has_run = True

    def _send_tokens(self) -> None:
        if self._events:
            self.engine.right_of_way.let_tokens_through()
        self.flush()

    def _check_once(self) -> None:
        """Checks the pools slice by slice; gives up for a command, which may change them, and begins again after it."""
        if self._is_checked:
            return
        for _ in self.engine.cache.pool_checks():
            if not self._commands.empty():
                return
        self._is_checked = True

    def flush(self) -> None:
        """From the engine's thread: hands what was delivered so far to the event loop now, in the midst of a step."""
        if self._events:
            events, self._events = self._events, []
            try:
                self._loop.call_soon_threadsafe(_call_all, events)
            except RuntimeError:
                log.info("%d events after the event loop had closed", len(events))


def _call_all(events: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for callback, args in events:
        callback(*args)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
