"""The decode role: receives prompts from prefill nodes, and generates from the second token on.

`DecodeLifecycle` decides; `DecodeDriver` obeys it for one request, with the engine, a session and the router's call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from functools import partial
from typing import assert_never

from decode_node.accounting import HitAccounting
from decode_node.config import DecodeNodeConfig
from decode_node.fetch_server import FetchServer
from decode_node.lifecycle import (
    CancelSession,
    CountAdmission,
    DecodeInput,
    DecodeInstruction,
    DecodeLifecycle,
    FinishAnswer,
    OpenSession,
    ReplyDecoded,
    RunDecode,
    SessionLanded,
    decode_report,
    with_joined_tokens,
)
from decode_node.policy import PrefillLocation
from headrace.engine.requests import BadRequest
from headrace.engine.sequence import Admitted, Event, Job
from headrace.request import FinishReason
from headrace.wire.messages import (
    DecodeCommand,
    DecodeDone,
    DecodeEvent,
    DecodeReport,
    Reservation,
    SessionFailed,
    Start,
    TransferReport,
)
from node_runtime.lifecycle import CallBroken, CallEnded, Fail, Refuse, Release, Reply
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import NoCapacity, reserve
from transfer.protocol.envelope import new_nonce
from transfer.protocol.errors import TransferFailed
from transfer.receiver import IncomingTransfer, TransferReceiver


class DecodeRole:
    """Serves any number of requests at a time, and the fetches of prefill nodes."""

    def __init__(self, runtime: NodeRuntime, config: DecodeNodeConfig) -> None:
        self.fetch_server = FetchServer(runtime)
        self._runtime = runtime
        self._config = config
        self._receiver = TransferReceiver(runtime.transport, runtime.staging)
        self._accounting = HitAccounting(runtime.layout)

    def counters(self) -> dict[str, float]:
        return {**self._accounting.counters(), **self.fetch_server.counters()}

    async def close(self) -> None:
        """Does nothing: calls have ended with the gRPC server, and sessions end with the transport."""

    def run(
        self, start: Start, commands: AsyncIterator[DecodeCommand], timeout_s: float
    ) -> AsyncGenerator[DecodeEvent, None]:
        """Returns the messages for the router. Closing the iterator aborts the request; all it held is given back.

        commands   the router's, after `start`
        Raises BadRequest, also when `commands` does; NoCapacity; LayoutMismatch.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return DecodeDriver(
            self._runtime, self._config, self._receiver, self._accounting, start=start, deadline_s=deadline_s
        ).run(commands)


class DecodeDriver:
    """One request and the call in which the router follows it."""

    def __init__(
        self,
        runtime: NodeRuntime,
        config: DecodeNodeConfig,
        receiver: TransferReceiver,
        accounting: HitAccounting,
        *,
        start: Start,
        deadline_s: float,
    ) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._loop = runtime.loop
        self._config = config
        self._receiver = receiver
        self._accounting = accounting
        self._clock = asyncio.get_running_loop().time
        self._deadline_s = deadline_s
        self._lifecycle = DecodeLifecycle(new_nonce)
        self._inbox: asyncio.Queue[Event | DecodeInput] = asyncio.Queue()
        self._sequence = self._engine.sequence(self._job(start))
        self._session: IncomingTransfer | None = None

    async def run(self, commands: AsyncIterator[DecodeCommand]) -> AsyncGenerator[DecodeEvent, None]:
        reading = asyncio.create_task(self._read(commands))
        self._loop.post(lambda: self._engine.submit(self._sequence))
        try:
            while not self._lifecycle.is_over:
                for event in with_joined_tokens(await self._waiting_events()):
                    for instruction in self._lifecycle.on(event):
                        if (message := await self._obey(instruction)) is not None:
                            yield message
        finally:
            reading.cancel()
            self._runtime.spawn(self._give_back())

    def _job(self, start: Start) -> Job:
        request, sampling = start.request, start.request.sampling
        is_scored = sampling.prompt_logprobs is not None
        location = PrefillLocation(
            self._config.local_prefill, len(request.tokens), start.may_prefill_remotely, is_scored
        )
        return Job(
            request=request,
            hit_policy=location.hit_policy,
            max_new=sampling.max_tokens - (len(request.tokens) - request.num_prompt_tokens),
            admit_by_s=min(self._deadline_s, self._clock() + self._config.admission_timeout_s),
            on_event=partial(self._loop.deliver, self._inbox.put_nowait),
            compute_by_s=None if start.may_prefill_remotely else self._deadline_s,
            prompt_logprobs=None if start.may_prefill_remotely else sampling.prompt_logprobs,
        )

    # ------------------------------------------------------------ events

    async def _read(self, commands: AsyncIterator[DecodeCommand]) -> None:
        try:
            async for command in commands:
                if isinstance(command, Start):
                    raise BadRequest("start is the first command of a call and comes once")
                self._inbox.put_nowait(command)
        except BadRequest as error:
            self._inbox.put_nowait(CallBroken(error))

    async def _watch(self, session: IncomingTransfer) -> None:
        nonce = session.plan.nonce
        try:
            landed = await session.landed()
        except TransferFailed as failure:
            self._inbox.put_nowait(SessionFailed(nonce, str(failure)))
            return
        if landed.first_token is None:
            message = "the last message carries no first token: the prefill node runs another version"
            self._inbox.put_nowait(CallBroken(ValueError(message)))
            return
        stats = landed.stats
        report = TransferReport(stats.attention_tokens, stats.attention_bytes, stats.state_bytes, stats.seconds)
        self._inbox.put_nowait(SessionLanded(nonce, landed.first_token, report))

    async def _waiting_events(self) -> list[Event | DecodeInput]:
        """Returns all events that wait, as soon as there is one."""
        events = [await self._inbox.get()]
        while not self._inbox.empty():
            events.append(self._inbox.get_nowait())
        return events

    # ------------------------------------------------------------ instructions

    async def _obey(self, instruction: DecodeInstruction) -> DecodeEvent | None:
        """Returns the message that the router gets, if any."""
        match instruction:
            case Reply(message):
                return message
            case ReplyDecoded(reason, admitted):
                return DecodeDone(reason, self._report(admitted))
            case OpenSession(admitted, nonce):
                return self._open_session(admitted, nonce)
            case CancelSession():
                if self._session is not None:  # None: opening it failed
                    self._session.cancel()
            case RunDecode(first_token):
                self._loop.post(lambda: self._engine.run_decode(self._sequence, first_token))
            case FinishAnswer():
                self._loop.post(lambda: self._engine.finish(self._sequence, FinishReason.STOP))
            case CountAdmission(admitted):
                self._accounting.admitted(admitted)
            case Refuse(message):
                raise NoCapacity(message)
            case Fail(error):
                raise error
            case Release():
                await self._release()
            case _:
                assert_never(instruction)
        return None

    def _open_session(self, admitted: Admitted, nonce: int) -> Reservation:
        reservation, self._session = reserve(
            self._runtime,
            self._receiver,
            self._sequence,
            admitted,
            nonce=nonce,
            num_tokens=self._sequence.prompt_length,
            deadline_s=self._deadline_s,
            timeout_s=self._config.reservation_timeout_s,
        )
        self._runtime.spawn(self._watch(self._session))
        return reservation

    def _report(self, admitted: Admitted) -> DecodeReport:
        sequence = self._sequence
        return decode_report(
            self._config.name,
            admitted,
            computed_tokens=sequence.num_prefilled,
            checkpoints=sequence.all_checkpoints,
        )

    async def _give_back(self) -> None:
        for instruction in self._lifecycle.on(CallEnded()):
            await self._obey(instruction)

    async def _release(self) -> None:
        """Releases blocks and slot after the last session: those before it had ended when it was opened."""
        if self._session is not None:
            with suppress(TransferFailed):
                await self._session.landed()
        self._loop.post(lambda: self._engine.release(self._sequence))
