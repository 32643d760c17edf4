"""The prefill role: compute a prompt, sample its first token, hand blocks and state over as they are ready.

One `_Prefill` is one request's life here: everything that can happen to it arrives in one inbox. Its order:
admission; perhaps a fetch of what a decode node holds of the prompt (if that fails, the prompt is computed as if nobody
had been asked); chunks; the first token; the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial

from headrace.engine.sequence import (
    AdmissionTimedOut,
    Admitted,
    Computed,
    DeviceEvent,
    Event,
    Finished,
    Job,
    Sampled,
    Scored,
    Sequence,
)
from headrace.wire.client import FetchClient
from headrace.wire.messages import (
    FetchSource,
    FirstToken,
    PrefillDone,
    PrefillEvent,
    PrefillReport,
    PrefillRequest,
    PromptLogprobs,
    Reservation,
)
from node_runtime.errors import NoRoom
from node_runtime.packing import BlockLocation
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import LEASE_MARGIN_S, plan_of
from prefill_node.config import PrefillNodeConfig
from prefill_node.fetch import Fetch, Fetches, FetchFailed
from transfer.buffers import StagingBuffer
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage
from transfer.sender import OutgoingTransfer, TransferSender


class Prefill:
    """Serves prefills on one runtime; any number at a time. `connect` opens a line to a decode node."""

    def __init__(
        self, runtime: NodeRuntime, config: PrefillNodeConfig, connect: Callable[[FetchSource], FetchClient]
    ) -> None:
        self._runtime = runtime
        self._sender = TransferSender(runtime.transport, runtime.staging)
        self._fetches = Fetches(runtime, config.fetch_from_decode, connect)

    def counters(self) -> dict[str, float]:
        return self._fetches.counters()

    async def close(self) -> None:
        """Closes what this role opened beside the runtime; no prefill may be running."""
        await self._fetches.close()

    async def run(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """The request's events. Closing the iterator aborts it; either way all it held comes back.

        Raises LayoutMismatch, BadRequest, NoRoom, TransferFailed.
        """
        if request.reservation is not None:
            self._runtime.require_layout(request.reservation.layout)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        prefill = _Prefill(self._runtime, self._sender, self._fetches, request, deadline_s)
        try:
            async with aclosing(prefill.run()) as events:
                async for event in events:
                    yield event
        finally:
            self._runtime.spawn(prefill.give_back())


class _Prefill:
    def __init__(
        self, runtime: NodeRuntime, sender: TransferSender, fetches: Fetches, request: PrefillRequest, deadline_s: float
    ) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._loop = runtime.loop
        self._clock = asyncio.get_running_loop().time
        self._sender = sender
        self._fetches = fetches
        self._request = request
        self._deadline_s = deadline_s
        self._inbox: asyncio.Queue[Event | TransferFailed | asyncio.Task[None]] = asyncio.Queue()
        self._policy = fetches.policy(request)
        self._sequence = self._new_sequence()
        self._transfer: OutgoingTransfer | None = None
        self._fetch: Fetch | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._has_tried = False
        self._admitted: Admitted | None = None
        self._resumed_tokens = 0
        self._began_s = 0.0

    async def run(self) -> AsyncGenerator[PrefillEvent, None]:
        self._loop.post(lambda: self._engine.submit(self._sequence))
        if self._request.reservation is not None:
            self._open(self._request.reservation)
        while True:
            match await self._inbox.get():
                case Admitted() as admitted:
                    await self._begin(admitted)
                case asyncio.Task() as fetching:
                    await self._fetch_ended(fetching)
                case Computed(num_tokens, device_event):
                    await self._tell_computed(num_tokens, device_event)
                case Scored(tokens):
                    yield PromptLogprobs(tokens)
                case Sampled() as sampled:
                    self._fetches.costs.computed(self._sequence.num_prefilled, self._clock() - self._began_s)
                    hands_over = self._finish_transfer(sampled)
                    yield FirstToken(sampled.token, sampled.finish)
                    if hands_over is not None:
                        await hands_over.done()
                    break
                case Finished():
                    break
                case AdmissionTimedOut(message):
                    raise NoRoom(message)
                case TransferFailed() as failure:
                    raise failure
        yield PrefillDone(self._report())

    async def give_back(self) -> None:
        """Ends fetch and hand-over, then releases blocks and slot: nothing reads or writes them any more."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        if self._fetch is not None:
            await self._fetch.end()
        if self._transfer is not None:
            self._transfer.cancel()
            # Its failure was reported where it mattered; here only that packing has ended.
            with suppress(TransferFailed):
                await self._transfer.done()
        self._loop.post(lambda: self._engine.release(self._sequence))

    def _new_sequence(self) -> Sequence:
        request, config = self._request.request, self._runtime.config
        num_output = len(request.tokens) - request.num_prompt_tokens
        return self._engine.sequence(
            Job(
                request=request,
                hit_policy=self._policy.hit_policy,
                max_new=min(1, request.sampling.max_tokens - num_output),
                admit_by_s=min(self._deadline_s, self._clock() + config.admission_timeout_s),
                on_event=partial(self._loop.deliver, self._inbox.put_nowait),
                prompt_logprobs=request.sampling.prompt_logprobs,
            )
        )

    # ------------------------------------------------------------ what it starts from

    async def _begin(self, admitted: Admitted) -> None:
        """The engine computes from what is here; or it waits for a fetch, and then computes either way."""
        self._admitted = admitted
        if admitted.state_arrives:
            self._try_fetch(admitted)
            return
        if not self._has_tried and self._policy.candidate(admitted.hit) is not None:
            self._fetches.declined()
        await self._computes_from(admitted.reused_tokens, admitted.device_event)

    def _try_fetch(self, admitted: Admitted) -> None:
        """Its end comes through the inbox: a hand-over that fails meanwhile ends the prefill, and the fetch with it."""
        assert self._request.fetch_source is not None, "the policy waits for a fetch source's state"
        self._has_tried = True
        try:
            self._fetch = self._fetches.open(self._sequence, self._request.fetch_source, admitted, self._deadline_s)
        except FetchFailed:
            self._compute_instead()
            return
        self._fetching = asyncio.create_task(self._fetches.run(self._fetch))
        self._fetching.add_done_callback(self._inbox.put_nowait)

    async def _fetch_ended(self, fetching: asyncio.Task[None]) -> None:
        assert self._fetch is not None and self._admitted is not None
        try:
            fetching.result()
        except FetchFailed:
            self._compute_instead()
            return
        num_tokens = self._fetch.fetch_source.num_tokens
        self._loop.post(lambda: self._engine.resume(self._sequence, num_tokens))
        await self._computes_from(num_tokens, self._admitted.device_event)

    def _compute_instead(self) -> None:
        self._loop.post(lambda: self._engine.compute_instead(self._sequence))  # it is admitted once more

    async def _computes_from(self, num_tokens: int, device_event: DeviceEvent | None) -> None:
        self._resumed_tokens, self._began_s = num_tokens, self._clock()
        if num_tokens:
            await self._tell_computed(num_tokens, device_event)

    # ------------------------------------------------------------ the hand-over

    def _open(self, reservation: Reservation) -> None:
        deadline_s = min(self._deadline_s, self._clock() + reservation.deadline_s)
        # Should this coroutine's clean-up never come, the blocks come back a little after the deadline.
        lease_ends_s = deadline_s + LEASE_MARGIN_S
        self._loop.post(lambda: self._engine.lease(self._sequence, lease_ends_s))
        self._transfer = self._sender.open(
            plan_of(reservation, self._runtime.config.message_bytes),
            reservation.transfer_address,
            secret=reservation.secret,
            pack=self._pack,
            deadline_s=deadline_s,
        )
        self._runtime.spawn(self._report_failure(self._transfer))

    async def _report_failure(self, transfer: OutgoingTransfer) -> None:
        """A hand-over that fails while the prompt still computes ends the prefill: nobody waits for it."""
        try:
            await transfer.done()
        except TransferFailed as failure:
            self._inbox.put_nowait(failure)

    async def _pack(self, message: PlannedMessage, buffer: StagingBuffer) -> None:
        await self._runtime.packing.gather(message, buffer, self._location)

    def _location(self) -> BlockLocation:
        assert self._request.reservation is not None, "there is somebody to pack for"
        return BlockLocation(self._sequence.held.block_ids, self._sequence.state_slot, self._request.reservation.layout)

    async def _tell_computed(self, num_tokens: int, device_event: DeviceEvent | None) -> None:
        """The engine tells of a chunk when it has launched it: it may go when the device has computed it."""
        if self._transfer is not None:
            await self._runtime.packing.wait_event(device_event)
            self._transfer.tokens_computed(num_tokens)

    def _finish_transfer(self, sampled: Sampled) -> OutgoingTransfer | None:
        """Lets the state go; None if there is nobody, or nothing, to go on with it."""
        first_token = self._request.first_token
        # A retry goes on after the token that the client has seen, whatever is sampled this time.
        if self._transfer is None or (sampled.finish is not None and first_token is None):
            return None
        self._transfer.finish(sampled.token.id if first_token is None else first_token)
        return self._transfer

    # ------------------------------------------------------------ what it says

    def _report(self) -> PrefillReport:
        assert self._admitted is not None, "the engine admits before it computes"
        return PrefillReport(
            node=self._runtime.config.name,
            attention_hit_tokens=self._admitted.hit.attention_tokens,
            state_hit_tokens=self._admitted.hit.state_tokens,
            resumed_tokens=self._resumed_tokens,
            computed_tokens=self._sequence.num_prefilled,
            checkpoints=self._sequence.all_checkpoints,
            fetched_tokens=self._resumed_tokens - self._admitted.hit.resumable_tokens,
        )
