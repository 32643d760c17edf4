"""One request on a decode node: `DecodeDriver` obeys `DecodeLifecycle`, with engine, session and the router's call."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import assert_never

from decode_node.accounting import HitAccounting
from decode_node.config import DecodeConfig
from decode_node.events import (
    Adopted,
    CancelSending,
    CancelSession,
    CountAdmission,
    DecodeInput,
    DecodeInstruction,
    FinishAnswer,
    HaltAnswer,
    OpenSession,
    ReplyDecoded,
    ResumeAnswer,
    RouterLost,
    RunDecode,
    Running,
    SendRequest,
    SessionLanded,
    StateSent,
)
from decode_node.lifecycle import DecodeLifecycle, decode_report, with_joined_tokens
from decode_node.orphans import AnswerSoFar, Orphans
from decode_node.policy import PrefillLocation
from decode_node.unsent import UnsentTokens
from headrace.engine.intake import BadRequest
from headrace.engine.sequence import Admitted, Computed, Event, Job, Sampled
from headrace.request import FinishReason, Request, Token
from headrace.wire.messages import (
    Abandon,
    DecodeCommand,
    DecodeDone,
    DecodeEvent,
    DecodeReport,
    Reservation,
    SessionFailed,
    Start,
    Tokens,
    TransferReport,
)
from node_runtime.fetch import Fetches
from node_runtime.lifecycle import (
    CallBroken,
    CallEnded,
    CancelFetch,
    Fail,
    PrefillLocally,
    Refuse,
    Release,
    Reply,
    ResumePrefill,
    StartFetch,
)
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import NoCapacity, reserve, send
from node_runtime.token_feeds import UNFED, FedCall
from transfer.protocol.envelope import new_nonce
from transfer.protocol.errors import TransferFailed
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer

log = logging.getLogger(__name__)

DEADLINE_MARGIN_S = 1.0


class DecodeDriver:
    """One request and the call in which the router follows it; if a router is lost, the next call of another one."""

    def __init__(
        self,
        runtime: NodeRuntime,
        config: DecodeConfig,
        receiver: TransferReceiver,
        accounting: HitAccounting,
        orphans: Orphans[DecodeDriver],
        fetches: Fetches,
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
        self._orphans = orphans
        self._fetches = fetches
        self._fetch_source = start.fetch_source
        self._fetch_policy = fetches.policy(start.request, start.fetch_source)
        self._computes_here = not start.may_prefill_remotely and not start.is_handed_over
        self._answer = AnswerSoFar(start.request)
        self._is_abandoned = False
        self._events: deque[DecodeInput] = deque()
        self._lifecycle = DecodeLifecycle(new_nonce, computes_here=self._computes_here)
        self._inbox: asyncio.Queue[Event | DecodeInput] = asyncio.Queue()
        self._sequence = self._engine.intake.sequence(self._job(start))
        self._session: IncomingTransfer | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_to: int | None = None
        self._outgoing: OutgoingTransfer | None = None
        self._unsent = UnsentTokens(config.max_unsent_tokens)
        self._fed = UNFED
        self._only_feeds = False
        """True while a token would be replied to the router at once, and nothing else is under way to it."""

    async def run(self, commands: AsyncIterator[DecodeCommand], fed: FedCall) -> AsyncGenerator[DecodeEvent, None]:
        """Yields the call's messages, but for tokens that go by its feed."""
        self._fed = fed
        await self._runtime.submit(self._sequence)
        async with aclosing(self._serve(commands)) as messages:
            async for message in messages:
                yield message

    async def go_on(
        self, request: Request, commands: AsyncIterator[DecodeCommand], deadline_s: float, fed: FedCall
    ) -> AsyncGenerator[DecodeEvent, None]:
        """As `run`, for a router that continues the request: what it has not shown comes first."""
        self._fed = fed
        self._deadline_s = deadline_s
        self._events.appendleft(Adopted(request.num_prompt_tokens, self._answer.beyond(request)))
        async with aclosing(self._serve(commands)) as messages:
            async for message in messages:
                yield message

    async def _serve(self, commands: AsyncIterator[DecodeCommand]) -> AsyncGenerator[DecodeEvent, None]:
        reading = asyncio.create_task(self._read(commands))
        is_cut_off = has_answered = False
        try:
            while not self._lifecycle.is_over:
                # Here everything before has left by the call's own stream, and traces have seen its first tokens.
                self._only_feeds = has_answered and isinstance(self._lifecycle.state, Running)
                event = await self._next_event()
                self._only_feeds = False
                if isinstance(event, Tokens):
                    has_answered = True
                    self._answer.add(event)
                try:
                    for instruction in self._lifecycle.on(event):
                        if (message := await self._obey(instruction)) is not None:
                            yield message  # returns when gRPC has taken it over: not while its buffers are full
                finally:
                    self._handled(event)
        except (asyncio.CancelledError, GeneratorExit):  # not by an error of this node
            is_cut_off = True
            raise
        finally:
            self._only_feeds = False
            reading.cancel()
            self._call_ended(is_cut_off)

    def _job(self, start: Start) -> Job:
        request, sampling = start.request, start.request.sampling
        is_scored = sampling.prompt_logprobs is not None
        location = PrefillLocation(
            self._config.local_prefill,
            len(request.tokens),
            start.may_prefill_remotely,
            is_scored=is_scored,
            is_handed_over=start.is_handed_over,
            fetch=self._fetch_policy,
        )
        return Job(
            request=request,
            hit_policy=location.hit_policy,
            max_new=sampling.max_tokens - (len(request.tokens) - request.num_prompt_tokens),
            admit_by_s=min(self._deadline_s, self._clock() + self._config.admission_timeout_s),
            on_event=partial(self._loop.deliver, self._take),
            compute_by_s=None if start.may_prefill_remotely else self._deadline_s,
            prompt_logprobs=None if start.may_prefill_remotely else sampling.prompt_logprobs,
        )

    # ------------------------------------------------------------ events

    def _take(self, event: Event) -> None:
        if isinstance(event, Sampled) and self._is_fed(event):
            return
        self._inbox.put_nowait(event)
        if isinstance(event, Sampled) and self._unsent.sampled(1):
            self._loop.post(lambda: self._engine.pause(self._sequence))

    def _is_fed(self, sampled: Sampled) -> bool:
        """True if the token went by the feed at once, as most do: this takes a tenth of waking the call's task for it,
        and the engine's thread waits for the interpreter's lock meanwhile."""
        if not self._only_feeds or sampled.finish is not None or not self._inbox.empty():
            return False
        if not self._fed.put_plain((sampled.token,)):
            return False
        self._answer.add(Tokens((sampled.token,)))
        return True

    def _handled(self, event: DecodeInput) -> None:
        """Counts sampled tokens as sent; also those lost with their call, which the next one gets in `Adopted`."""
        if isinstance(event, Tokens) and self._unsent.sent(len(event.tokens)):
            self._loop.post(lambda: self._engine.unpause(self._sequence))

    async def _read(self, commands: AsyncIterator[DecodeCommand]) -> None:
        try:
            async for command in commands:
                if isinstance(command, Start):
                    raise BadRequest("start is the first command of a call and comes once")
                if isinstance(command, Abandon):
                    self._is_abandoned = True
                    return
                self._inbox.put_nowait(command)
        except BadRequest as error:
            self._inbox.put_nowait(CallBroken(error))

    async def _watch(self, session: IncomingTransfer) -> None:
        nonce = session.plan.nonce
        try:
            landed = await session.landed()
        except TransferFailed as failure:
            log.info("request %s: its transfer failed: %s", self._sequence.request.request_id, failure)
            self._inbox.put_nowait(SessionFailed(nonce, str(failure)))
            return
        if landed.first_token is None:
            message = "the last message carries no first token: the prefill node runs another version"
            self._inbox.put_nowait(CallBroken(ValueError(message)))
            return
        stats = landed.stats
        report = TransferReport(stats.attention_tokens, stats.attention_bytes, stats.state_bytes, stats.seconds)
        self._inbox.put_nowait(SessionLanded(nonce, landed.first_token, report))

    async def _next_event(self) -> DecodeInput:
        """Returns the next event as soon as there is one. What waits is kept if the call ends meanwhile."""
        if not self._events:
            waiting = [await self._inbox.get()]
            while not self._inbox.empty():
                waiting.append(self._inbox.get_nowait())
            self._events.extend(with_joined_tokens(waiting))
        return self._events.popleft()

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
                self._answer.add(Tokens((Token(first_token),)))
                self._loop.post(lambda: self._engine.run_decode(self._sequence, first_token))
            case FinishAnswer():
                self._loop.post(lambda: self._engine.finish(self._sequence, FinishReason.STOP))
            case HaltAnswer():
                self._loop.post(lambda: self._engine.halt(self._sequence))
            case ResumeAnswer():
                self._loop.post(lambda: self._engine.unhalt(self._sequence))
            case SendRequest(reservation, computed):
                await self._send(reservation, computed)
            case CancelSending():
                if self._outgoing is not None:  # None: opening it failed
                    self._outgoing.cancel()
            case CountAdmission(admitted):
                self._accounting.admitted(admitted, computes_here=self._computes_here)
                if not admitted.state_arrives and self._fetch_policy.candidate(admitted.hit) is not None:
                    self._fetches.declined()
            case StartFetch(admitted):
                self._fetching = asyncio.create_task(self._fetch(admitted))
            case CancelFetch():
                if self._fetching is not None:
                    self._fetching.cancel()
            case ResumePrefill(num_tokens):
                self._fetched_to = num_tokens
                self._loop.post(lambda: self._engine.resume_prefill(self._sequence, num_tokens))
            case PrefillLocally():
                self._loop.post(lambda: self._engine.prefill_locally(self._sequence))
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

    async def _fetch(self, admitted: Admitted) -> None:
        assert self._fetch_source is not None, "the policy fetches only if there is a source"
        ended = await self._fetches.outcome(self._sequence, self._fetch_source, admitted, self._deadline_s)
        self._inbox.put_nowait(ended)

    async def _send(self, reservation: Reservation, computed: Computed) -> None:
        """Opens the transfer of a halted request and lets it send everything. Raises BadRequest, LayoutMismatch."""
        if reservation.num_tokens != computed.num_tokens:
            raise BadRequest(
                f"the request has halted after {computed.num_tokens} computed tokens, and {reservation.num_tokens} "
                "are reserved for it: reserve for all its tokens but the last one"
            )
        self._runtime.require_layout(reservation.layout)
        self._outgoing = send(self._runtime, self._sequence, reservation, deadline_s=self._deadline_s)
        self._runtime.spawn(self._watch_sending(self._outgoing))
        await self._runtime.packing.wait_event(computed.device_event)
        self._outgoing.tokens_computed(computed.num_tokens)
        self._outgoing.finish(self._sequence.tokens[-1])

    async def _watch_sending(self, transfer: OutgoingTransfer) -> None:
        try:
            await transfer.done()
        except TransferFailed as failure:
            self._inbox.put_nowait(CallBroken(failure))
        else:
            self._inbox.put_nowait(StateSent())

    def _report(self, admitted: Admitted) -> DecodeReport:
        sequence = self._sequence
        return decode_report(
            self._config.name,
            admitted,
            computed_tokens=sequence.num_prefilled,
            checkpoints=sequence.all_checkpoints,
            resumed_tokens=self._fetched_to,
            drafts=(sequence.drafted_tokens, sequence.accepted_tokens),
        )

    # ------------------------------------------------------------ the end of a call

    @property
    def request(self) -> Request:
        return self._answer.request

    def continues(self, request: Request) -> bool:
        """True if the router of this request can show what is left of the answer."""
        return self._answer.fits(request)

    async def give_up(self) -> None:
        """Ends a request that no router continues."""
        await self._give_back()

    def _call_ended(self, is_cut_off: bool) -> None:
        # At its deadline a call ends without a word, too, and a little earlier on the router than here.
        has_time = self._clock() + DEADLINE_MARGIN_S < self._deadline_s
        is_lost = is_cut_off and has_time and self.request.is_resumable and not self._is_abandoned
        may_go_on = isinstance(self._lifecycle.state, Running) and self._answer.is_whole
        if is_lost and may_go_on and self._orphans.keep(self):
            self._lifecycle.on(RouterLost())
        else:
            self._runtime.spawn(self._give_back())

    async def _give_back(self) -> None:
        for instruction in self._lifecycle.on(CallEnded()):
            await self._obey(instruction)

    async def _release(self) -> None:
        """Releases blocks and slot after a fetch, after the last session (those before it had ended when it was opened)
        and after a transfer to another node."""
        if self._fetching is not None:
            await asyncio.wait([self._fetching])
        if self._session is not None:
            with suppress(TransferFailed):
                await self._session.landed()
        if self._outgoing is not None:
            with suppress(TransferFailed):
                await self._outgoing.done()
        self._loop.post(lambda: self._engine.release(self._sequence))
