"""The prefill role: compute a prompt, sample its first token, hand blocks and state over as they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

import torch

from cache.hits import HitPolicy, PrefixHit, ResumeLocally
from engine.sequence import Admitted, Computed, Event, Finished, Job, Refused, Sampled, Scored, Sequence
from node.chassis import Chassis
from node.errors import NoRoom
from node.notes import encode_note
from node.plans import plan_of
from transfer.buffers import Buffer
from transfer.errors import HandoverFailed, LayoutMismatch
from transfer.plan import Kind, PlannedMessage
from transfer.sender import HandoverSender, OutgoingHandover
from wire.messages import (
    FirstToken,
    PrefillDone,
    PrefillEvent,
    PrefillReport,
    PrefillRequest,
    PromptLogprobs,
    Reservation,
)

_RESUME = ResumeLocally()


def _resume_locally(hit: PrefixHit) -> HitPolicy:
    """A prefill node computes the state itself, whatever it finds."""
    return _RESUME


class Prefill:
    """Serves prefills on one chassis; any number at a time."""

    def __init__(self, chassis: Chassis) -> None:
        self._chassis = chassis
        self._engine = chassis.built.engine
        self._loop = chassis.loop
        self._clock = asyncio.get_running_loop().time
        self._sender = HandoverSender(chassis.transport, chassis.staging)
        self._handed_over_bytes = 0
        self._handover_seconds = 0.0

    def counters(self) -> dict[str, float]:
        return {
            "handed_over_bytes": float(self._handed_over_bytes),
            "handover_seconds": self._handover_seconds,
        }

    async def run(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """The request's events. Closing the iterator aborts it; either way all it held comes back.

        Raises LayoutMismatch, RequestTooLarge, NoRoom, HandoverFailed.
        """
        if request.reservation is not None:
            self._require_layout(request.reservation)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        inbox: asyncio.Queue[Event | HandoverFailed] = asyncio.Queue()
        sequence = self._submit(request, deadline_s, inbox)
        handover: OutgoingHandover | None = None
        try:
            if request.reservation is not None:
                handover = self._open(request.reservation, sequence, deadline_s)
                self._chassis.spawn(_report_failure(handover, inbox))
            async with aclosing(self._events(request, sequence, inbox, handover)) as events:
                async for event in events:
                    yield event
        finally:
            self._chassis.spawn(self._give_back(sequence, handover))

    def _submit(
        self, request: PrefillRequest, deadline_s: float, inbox: asyncio.Queue[Event | HandoverFailed]
    ) -> Sequence:
        sampling = request.request.sampling
        num_output = len(request.request.tokens) - request.request.num_prompt_tokens
        job = Job(
            request=request.request,
            hit_policy=_resume_locally,
            max_new=min(1, sampling.max_tokens - num_output),
            admit_by_s=min(deadline_s, self._clock() + self._chassis.config.admission_timeout_s),
            on_event=partial(self._loop.deliver, inbox.put_nowait),
            prompt_logprobs=sampling.prompt_logprobs,
        )
        sequence = self._engine.sequence(job)
        self._loop.post(lambda: self._engine.submit(sequence))
        return sequence

    async def _events(
        self,
        request: PrefillRequest,
        sequence: Sequence,
        inbox: asyncio.Queue[Event | HandoverFailed],
        handover: OutgoingHandover | None,
    ) -> AsyncGenerator[PrefillEvent, None]:
        admitted: Admitted | None = None
        while True:
            match await inbox.get():
                case Admitted() as admitted:
                    if handover is not None and admitted.reused_tokens:
                        handover.tokens_computed(admitted.reused_tokens)
                case Computed(num_tokens):
                    if handover is not None:
                        handover.tokens_computed(num_tokens)
                case Scored(tokens):
                    yield PromptLogprobs(tokens)
                case Sampled(token, finish):
                    # A retry goes on after the token that the client has seen, whatever is sampled this time.
                    goes_on = finish is None or request.first_token is not None
                    if handover is not None and goes_on:
                        first = token.id if request.first_token is None else request.first_token
                        handover.finish(encode_note(first))
                    yield FirstToken(token, finish)
                    if handover is not None and goes_on:
                        await self._handed_over(handover)
                    break
                case Finished():
                    break
                case Refused(message):
                    raise NoRoom(message)
                case HandoverFailed() as failure:
                    raise failure
        assert admitted is not None, "the engine admits before it computes"
        yield PrefillDone(self._report(sequence, admitted))

    def _open(self, reservation: Reservation, sequence: Sequence, deadline_s: float) -> OutgoingHandover:
        deadline_s = min(deadline_s, asyncio.get_running_loop().time() + reservation.deadline_s)
        # Should this coroutine's clean-up never come, the blocks come back a little after the deadline.
        self._loop.post(lambda: self._engine.lease(sequence, deadline_s + self._chassis.config.shutdown_grace_s))
        return self._sender.open(
            plan_of(reservation),
            reservation.transfer_address,
            pack=partial(self._pack, sequence),
            deadline_s=deadline_s,
        )

    async def _pack(self, sequence: Sequence, message: PlannedMessage, buffer: Buffer) -> None:
        await self._loop.call(lambda: self._gather(sequence, message, buffer))

    def _gather(self, sequence: Sequence, message: PlannedMessage, buffer: Buffer) -> None:
        """In the engine's thread: one message's bytes, in order."""
        memory, out = self._chassis.built.memory, torch.from_numpy(buffer)
        if message.kind is Kind.STATE:
            memory.gather_state(sequence.state_slot, out)
        else:
            blocks = sequence.held.block_ids[message.first_block : message.first_block + message.num_blocks]
            memory.gather_blocks(blocks, out)

    async def _handed_over(self, handover: OutgoingHandover) -> None:
        stats = await handover.done()
        self._handed_over_bytes += stats.attention_bytes + stats.state_bytes
        self._handover_seconds += stats.seconds

    async def _give_back(self, sequence: Sequence, handover: OutgoingHandover | None) -> None:
        if handover is not None:
            handover.cancel()
            # Its failure was reported where it mattered; here only that packing has ended.
            with suppress(HandoverFailed):
                await handover.done()
        self._loop.post(lambda: self._engine.release(sequence))

    def _require_layout(self, reservation: Reservation) -> None:
        mismatch = self._chassis.built.layout.mismatch(reservation.layout)
        if mismatch is not None:
            raise LayoutMismatch(f"{mismatch}: restart one of the two nodes with the other's setting")

    def _report(self, sequence: Sequence, admitted: Admitted) -> PrefillReport:
        return PrefillReport(
            node=self._chassis.config.name,
            attention_hit_tokens=admitted.hit.attention_tokens,
            state_hit_tokens=admitted.hit.state_tokens,
            resumed_tokens=admitted.reused_tokens,
            computed_tokens=sequence.num_prefilled,
            checkpoints=sequence.all_checkpoints,
        )


async def _report_failure(handover: OutgoingHandover, inbox: asyncio.Queue[Event | HandoverFailed]) -> None:
    """A hand-over that fails while the prompt still computes ends the prefill: nobody waits for it."""
    try:
        await handover.done()
    except HandoverFailed as failure:
        inbox.put_nowait(failure)
