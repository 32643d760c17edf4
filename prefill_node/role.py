"""The prefill role: computes prompts, samples their first token, and sends blocks and state as they are ready.

`PrefillLifecycle` decides; `PrefillDriver` obeys it for one request, with the engine, transfers and the router's call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import assert_never

from headrace.engine.sequence import Admitted, Computed, Event, Job, Started
from headrace.wire.messages import PrefillDone, PrefillEvent, PrefillReport, PrefillRequest
from node_runtime.fetch import Fetches
from node_runtime.fetch_policy import FetchPolicy
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
from node_runtime.sessions import NoCapacity, send
from prefill_node.lifecycle import (
    CancelTransfer,
    CountDeclinedFetch,
    OpenTransfer,
    PrefillInput,
    PrefillInstruction,
    PrefillLifecycle,
    ReplyPrefilled,
    SendComputed,
    SendState,
    TransferSent,
    prefill_report,
)
from transfer.protocol.errors import TransferFailed
from transfer.sender import OutgoingTransfer


class PrefillRole:
    """Serves any number of prefills at a time."""

    def __init__(self, runtime: NodeRuntime, fetches: Fetches) -> None:
        self._runtime = runtime
        self._fetches = fetches

    def counters(self) -> dict[str, float]:
        """None of its own: engine, cache, transport and fetches count their work themselves."""
        return {}

    def orphans(self) -> tuple[str, ...]:
        """None: a prefill is not worth keeping without the router that waits for it."""
        return ()

    async def abandon(self, request_ids: Sequence[str]) -> None:
        """Ends none of them: they are the decode role's."""

    async def close(self) -> None:
        """Nothing is open between two prefills."""

    def run(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """Returns the messages for the router. Closing the iterator aborts the request; all it held is given back.

        Raises LayoutMismatch, BadRequest, NoCapacity, TransferFailed.
        """
        if request.reservation is not None:
            self._runtime.require_layout(request.reservation.layout)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return PrefillDriver(self._runtime, self._fetches, request=request, deadline_s=deadline_s).run()


class PrefillDriver:
    """One request and the call in which the router follows it."""

    def __init__(
        self,
        runtime: NodeRuntime,
        fetches: Fetches,
        *,
        request: PrefillRequest,
        deadline_s: float,
    ) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._loop = runtime.loop
        self._fetches = fetches
        self._request = request
        self._deadline_s = deadline_s
        self._inbox: asyncio.Queue[PrefillInput] = asyncio.Queue()
        policy = fetches.policy(request.request, request.fetch_source)
        self._lifecycle = PrefillLifecycle(
            policy, is_sent=request.reservation is not None, first_token=request.first_token
        )
        self._sequence = self._engine.intake.sequence(self._job(policy))
        self._transfer: OutgoingTransfer | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def run(self) -> AsyncGenerator[PrefillEvent, None]:
        await self._runtime.submit(self._sequence)
        try:
            while not self._lifecycle.is_over:
                event = await self._inbox.get()
                for instruction in self._lifecycle.on(event):
                    if (message := await self._obey(instruction)) is not None:
                        yield message
        finally:
            self._runtime.spawn(self._give_back())

    def _job(self, policy: FetchPolicy) -> Job:
        """Every prompt before it ends, so that its turn comes: it waits as long as its caller does.

        But not behind requests that wait for prompts of other nodes, while it keeps room at one of these: that node may
        wait for this one.
        """
        request, is_sent = self._request.request, self._request.reservation is not None
        room_by_s = asyncio.get_running_loop().time() + self._runtime.config.admission_timeout_s
        num_output = len(request.tokens) - request.num_prompt_tokens
        return Job(
            request=request,
            hit_policy=policy.hit_policy,
            max_new=min(1, request.sampling.max_tokens - num_output),
            admit_by_s=self._deadline_s,
            on_event=self._on_event,
            yield_by_s=room_by_s if is_sent else None,
            compute_by_s=self._deadline_s,
            is_sent=is_sent,
            prompt_logprobs=request.sampling.prompt_logprobs,
        )

    def _on_event(self, event: Event) -> None:
        """Called in the engine's thread."""
        self._loop.deliver(self._inbox.put_nowait, event)
        if isinstance(event, Started):  # the router must know before the step, which may take long or end the node
            self._loop.flush()

    async def _obey(self, instruction: PrefillInstruction) -> PrefillEvent | None:
        """Returns the message that the router gets, if any."""
        match instruction:
            case Reply(message):
                return message
            case ReplyPrefilled(admitted, resumed_tokens):
                return PrefillDone(self._report(admitted, resumed_tokens))
            case OpenTransfer():
                self._open_transfer()
            case SendComputed(computed):
                await self._send_computed(computed)
            case SendState(first_token):
                self._outgoing.finish(first_token)
            case StartFetch(admitted):
                self._fetching = asyncio.create_task(self._fetch(admitted))
            case ResumePrefill(num_tokens):
                self._loop.post(lambda: self._engine.resume_prefill(self._sequence, num_tokens))
            case PrefillLocally():
                self._loop.post(lambda: self._engine.prefill_locally(self._sequence))
            case CountDeclinedFetch():
                self._fetches.declined()
            case Refuse(message):
                raise NoCapacity(message)
            case Fail(error):
                raise error
            case CancelFetch():
                if self._fetching is not None:
                    self._fetching.cancel()
            case CancelTransfer():
                if self._transfer is not None:  # None: opening it failed
                    self._transfer.cancel()
            case Release():
                await self._release()
            case _:
                assert_never(instruction)
        return None

    # ------------------------------------------------------------ transfer and fetch

    def _open_transfer(self) -> None:
        reservation = self._request.reservation
        assert reservation is not None, "the lifecycle sends only what a reservation came for"
        self._transfer = send(self._runtime, self._sequence, reservation, deadline_s=self._deadline_s)
        self._runtime.spawn(self._watch(self._transfer))

    async def _watch(self, transfer: OutgoingTransfer) -> None:
        try:
            await transfer.done()
        except TransferFailed as failure:
            self._inbox.put_nowait(CallBroken(failure))
        else:
            self._inbox.put_nowait(TransferSent())

    @property
    def _outgoing(self) -> OutgoingTransfer:
        assert self._transfer is not None, "the lifecycle sends only what a reservation came for"
        return self._transfer

    async def _send_computed(self, computed: Computed) -> None:
        """The engine reports tokens when it has launched their step: they may go when the device has computed them."""
        await self._runtime.packing.wait_event(computed.device_event)
        self._outgoing.tokens_computed(computed.num_tokens)

    async def _fetch(self, admitted: Admitted) -> None:
        fetch_source = self._request.fetch_source
        assert fetch_source is not None, "the policy fetches only if there is a source"
        ended = await self._fetches.outcome(self._sequence, fetch_source, admitted, self._deadline_s)
        self._inbox.put_nowait(ended)

    # ------------------------------------------------------------ the end

    def _report(self, admitted: Admitted, resumed_tokens: int) -> PrefillReport:
        sequence = self._sequence
        return prefill_report(
            self._runtime.config.name,
            admitted,
            resumed_tokens,
            computed_tokens=sequence.num_prefilled,
            checkpoints=sequence.all_checkpoints,
        )

    async def _give_back(self) -> None:
        for instruction in self._lifecycle.on(CallEnded()):
            await self._obey(instruction)

    async def _release(self) -> None:
        """Releases blocks and slot when neither fetch nor transfer uses them any more."""
        if self._fetching is not None:
            await asyncio.wait([self._fetching])
        if self._transfer is not None:
            with suppress(TransferFailed):
                await self._transfer.done()
        self._loop.post(lambda: self._engine.release(self._sequence))
