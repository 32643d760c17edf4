"""The decode role: reserve, receive what a prefill node hands over, decode from the second token on.

One `_Decode` is one request's life here: everything that can happen to it arrives in one inbox, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from decode_node.accounting import HitAccounting
from decode_node.config import DecodeNodeConfig
from decode_node.inbox import Inbox
from decode_node.policy import PrefillPlace
from headrace.engine.requests import BadRequest
from headrace.engine.sequence import (
    AdmissionTimedOut,
    Admitted,
    Computed,
    Event,
    Finished,
    Job,
    Sampled,
    Scored,
    Sequence,
)
from headrace.request import FinishReason
from headrace.wire.messages import (
    DecodeCommand,
    DecodeDone,
    DecodeEvent,
    DecodeReport,
    LocalPrefill,
    PromptLogprobs,
    Renew,
    Reservation,
    SessionFailed,
    Start,
    Stop,
    Tokens,
    TransferReport,
)
from node_runtime.errors import NoRoom
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import reserve
from transfer.protocol.errors import TransferFailed
from transfer.receiver import IncomingTransfer, Landed, TransferReceiver


@dataclass(frozen=True)
class _SessionEnded:
    """A session's outcome; `nonce` says which, since a renewed request has had several."""

    nonce: int
    outcome: Landed | TransferFailed


_Item = Event | DecodeCommand | _SessionEnded | BadRequest


class Decode:
    """Serves requests on one runtime; any number at a time."""

    def __init__(self, runtime: NodeRuntime, config: DecodeNodeConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._receiver = TransferReceiver(runtime.transport, runtime.staging)
        self._accounting = HitAccounting(runtime.layout)

    def counters(self) -> dict[str, float]:
        return self._accounting.counters()

    async def run(
        self, start: Start, commands: AsyncIterator[DecodeCommand], timeout_s: float
    ) -> AsyncGenerator[DecodeEvent, None]:
        """The request's events. Closing the iterator aborts it; either way all it held comes back.

        Raises BadRequest (a command that `commands` could not read, too), NoRoom.
        """
        request = _Decode(self._runtime, self._config, self._receiver, self._accounting)
        reading = asyncio.create_task(request.read(commands))
        try:
            async with aclosing(request.run(start, timeout_s)) as events:
                async for event in events:
                    yield event
        finally:
            reading.cancel()
            self._runtime.spawn(request.give_back())


class _Decode:
    def __init__(
        self,
        runtime: NodeRuntime,
        config: DecodeNodeConfig,
        receiver: TransferReceiver,
        accounting: HitAccounting,
    ) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._loop = runtime.loop
        self._config = config
        self._receiver = receiver
        self._accounting = accounting
        self._inbox: Inbox[_Item] = Inbox()
        self._sequence: Sequence | None = None
        self._admitted: Admitted | None = None
        self._transfer: IncomingTransfer | None = None
        self._is_landed = False

    async def read(self, commands: AsyncIterator[DecodeCommand]) -> None:
        """Puts the router's commands into the inbox; after one that cannot be read, what ends the request."""
        try:
            async for command in commands:
                self._inbox.put(command)
        except BadRequest as error:
            self._inbox.put(error)

    async def run(self, start: Start, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        sequence = self._submit(start)
        while True:
            match await self._inbox.get():
                case Admitted() as admitted:
                    self._admitted = admitted
                    self._accounting.admitted(admitted)
                    yield self._reserve() if admitted.state_arrives else LocalPrefill(admitted.reused_tokens)
                case Renew(nonce):
                    if await self._may_renew(nonce):
                        yield self._reserve()
                case _SessionEnded(nonce, outcome):
                    if self._transfer is not None and nonce == self._transfer.plan.nonce:
                        yield self._session_ended(nonce, outcome)
                case Sampled() as sampled:
                    yield self._tokens(sampled)
                case Scored(tokens):
                    yield PromptLogprobs(tokens)
                case Stop():
                    self._loop.post(lambda: self._engine.finish(sequence, FinishReason.STOP))
                case Finished(reason):
                    yield DecodeDone(reason, self._report(sequence))
                    return
                case AdmissionTimedOut(message):
                    raise NoRoom(message)
                case BadRequest() as error:
                    raise error
                case Computed():
                    pass  # a local prefill's progress is nobody else's business

    async def give_back(self) -> None:
        """Ends its session, then releases blocks and slot: nothing lands in them any more."""
        if self._transfer is not None:
            await self._end_session(self._transfer)
        if (sequence := self._sequence) is not None:
            self._loop.post(lambda: self._engine.release(sequence))

    def _submit(self, start: Start) -> Sequence:
        request, sampling = start.request, start.request.sampling
        now_s = asyncio.get_running_loop().time()
        scores = sampling.prompt_logprobs is not None
        place = PrefillPlace(self._config.local_prefill, len(request.tokens), start.may_prefill_remotely, scores)
        job = Job(
            request=request,
            hit_policy=place.hit_policy,
            max_new=sampling.max_tokens - (len(request.tokens) - request.num_prompt_tokens),
            admit_by_s=min(self._deadline_s, now_s + self._config.admission_timeout_s),
            on_event=partial(self._loop.deliver, self._inbox.put),
            prompt_logprobs=None if start.may_prefill_remotely else sampling.prompt_logprobs,
        )
        sequence = self._sequence = self._engine.sequence(job)
        self._loop.post(lambda: self._engine.submit(sequence))
        return sequence

    # ------------------------------------------------------------ the session

    def _reserve(self) -> Reservation:
        """A fresh session for the blocks beyond the attention hit and for the state."""
        assert self._admitted is not None and self._sequence is not None
        now_s = asyncio.get_running_loop().time()
        reservation, self._transfer = reserve(
            self._runtime,
            self._receiver,
            self._sequence,
            self._admitted,
            num_tokens=self._sequence.prompt_length,
            deadline_s=min(self._deadline_s, now_s + self._config.reservation_timeout_s),
        )
        self._runtime.spawn(self._watch(self._transfer))
        return reservation

    async def _watch(self, transfer: IncomingTransfer) -> None:
        outcome: Landed | TransferFailed
        try:
            outcome = await transfer.landed()
        except TransferFailed as failure:
            outcome = failure
        self._inbox.put(_SessionEnded(transfer.plan.nonce, outcome))

    def _session_ended(self, nonce: int, outcome: Landed | TransferFailed) -> DecodeEvent:
        if isinstance(outcome, TransferFailed):
            return SessionFailed(nonce, str(outcome))
        if outcome.first_token is None:
            raise ValueError("the last message carries no first token: the prefill node runs another version")
        self._is_landed = True
        sequence, first_token = self._sequence, outcome.first_token
        assert sequence is not None
        self._loop.post(lambda: self._engine.run_decode(sequence, first_token))
        stats = outcome.stats
        return TransferReport(stats.attention_tokens, stats.attention_bytes, stats.state_bytes, stats.seconds)

    async def _may_renew(self, failed_nonce: int) -> bool:
        """Ends the failed session. False when there is nothing to renew: it has landed, or is another by now."""
        if self._is_landed or self._transfer is None or self._transfer.plan.nonce != failed_nonce:
            return False
        # It may land after all while it is being ended: its _SessionEnded is in the inbox then.
        return not await self._end_session(self._transfer)

    async def _end_session(self, transfer: IncomingTransfer) -> bool:
        """Cancels it unless it has landed, which it returns. Nothing lands any more when this returns."""
        transfer.cancel()
        try:
            await transfer.landed()
        except TransferFailed:
            return False
        return True

    # ------------------------------------------------------------ what it says

    def _tokens(self, sampled: Sampled) -> Tokens:
        """A token, and those that came meanwhile: they travel in one message."""
        tokens = [sampled.token]
        while (more := self._inbox.take_if(Sampled)) is not None:
            sampled = more
            tokens.append(more.token)
        return Tokens(tuple(tokens), sampled.finish)

    def _report(self, sequence: Sequence) -> DecodeReport:
        assert self._admitted is not None
        admitted = self._admitted
        here = "resumed" if admitted.reused_tokens else "computed"
        return DecodeReport(
            node=self._config.name,
            attention_hit_tokens=admitted.hit.attention_tokens,
            state_hit_tokens=0 if admitted.state_arrives else admitted.hit.state_tokens,
            state="received" if admitted.state_arrives else here,
            computed_tokens=sequence.num_prefilled,
            checkpoints=sequence.all_checkpoints,
        )
