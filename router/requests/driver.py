"""Drives one request through the nodes: passes the events of its calls to its lifecycle, and obeys the instructions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from http import HTTPStatus
from typing import assert_never

from headrace.request import Request
from headrace.tracing import current
from headrace.wire import messages as m
from router.cluster.nodes import NodeEntry
from router.errors import NODE_CRASHED, ApiError, deadline_passed, internal_error
from router.requests import events as ev
from router.requests import relocation
from router.requests.admission import ANSWER_TOKENS, AdmissionPermit
from router.requests.attempt import Attempt
from router.requests.context import RouterContext
from router.requests.lifecycle import RequestLifecycle
from router.requests.moves import Move, MoveOutcome
from router.requests.node_calls import NodeCalls
from router.requests.node_search import NodeSearch
from router.requests.outputs import Ended, OutputSink
from router.requests.shapes import client_number, log_summary
from router.requests.siblings import Siblings
from router.requests.stages import outcome_of
from router.requests.states import Completed, RequestPhase
from router.routing.plan import NO_OBJECTIVES, Objectives

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 1.0  # for another decode node to reserve for a request that moves, and stands still meanwhile

# Each token is asked for these kinds: unions made anew for each of them took 2 % of the router's time.
_PROMPT_REPORTS = (m.PrefillDone, m.LocalPrefill)


class RequestDriver:
    """One request from the queue to its end. `sink` gets its outputs.

    Entering the `async with` block starts it as soon as the permit is granted; leaving cancels what still runs. The
    permit is held until then, or until `give_place_back`.
    """

    def __init__(
        self,
        context: RouterContext,
        request: Request,
        permit: AdmissionPermit,
        sink: OutputSink,
        siblings: Siblings | None = None,
        objectives: Objectives = NO_OBJECTIVES,
        session: str = "",
    ) -> None:
        self._context = context
        self._permit = permit
        self._now_s = context.clock
        self._sink = sink
        self._objectives = objectives
        self._stop_is_handled = False
        self._siblings = siblings or Siblings()
        self._search = NodeSearch(context, request, self._siblings, objectives, session)
        self._attempt: Attempt | None = None
        self._last_shown_s: float | None = None
        self._admitted_s = context.clock()
        self.life = RequestLifecycle(
            request,
            max_attempts=context.config.max_attempts,
            now_s=context.clock(),
            token_gap_s=objectives.token_gap_s,
        )
        self._calls = NodeCalls(
            context,
            self._search,
            self.life,
            sink,
            self._handle,
            self._take,
            deadline_s=context.clock() + context.config.request_timeout_s,
        )
        self._move: Move | None = None
        arrived_s = self.life.entered_s[RequestPhase.QUEUED]
        self._trace = context.tracing.begin("request", current.get(), arrived_s)
        context.table.add(self.life, self)

    async def __aenter__(self) -> RequestDriver:
        self._driving = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._driving.cancel()
        try:
            await asyncio.wait({self._driving})
        finally:  # also when the client leaves right now, which cancels that wait
            self._close()

    def _close(self) -> None:
        """Gives everything back that the request holds in the router. Waits for nothing: no cancellation skips it."""
        if self._attempt is not None:
            self._attempt.end_all()  # calls may still be closing: their last events are for nobody
        self._search.course.end(self._now_s())
        self.give_place_back()
        if self.life.finish is not None:
            self._context.answers.ended(len(self.life.generated))
        if not self.life.is_over:
            left = ApiError(HTTPStatus.REQUEST_TIMEOUT, "the client left", code="client_left")
            self.life.on(ev.GaveUp(left), self._now_s())
        self._settle_move()
        self._context.table.close(self.life)
        self._context.metrics.request_ended(self.life)
        if self._trace.is_recorded:
            self._trace.end(outcome_of(self.life, self._context.config.served_model_name))

    def give_place_back(self) -> None:
        """Lets the next request run: the client has taken the whole answer. More than once does no harm."""
        self._count_work(len(self.life.generated))
        self._permit.release()

    def _count_work(self, answer_tokens: int) -> None:
        num_prompt, report = self.life.request.num_prompt_tokens, self.life.report
        # What failed before a node had the prompt has cost nothing: a client that asks again pays once.
        was_computed = report.reused_tokens is not None or answer_tokens > 0
        computed = num_prompt - report.cached_tokens(num_prompt) if was_computed else 0
        self._permit.served(computed_tokens=computed, answer_tokens=answer_tokens)

    async def _drive(self) -> None:
        timeout_s = self._context.config.request_timeout_s
        current.set(self._trace.context)  # of this task, and of those that it starts: calls of nodes carry it
        try:
            async with asyncio.timeout(timeout_s):
                await self._permit.wait()
                self._admitted_s = self._now_s()
                while not self.life.is_over:
                    if self.life.failures.await_judgement:
                        await self._judge()
                    else:
                        await self._try_once()
        except TimeoutError:
            self._give_up(deadline_passed(timeout_s))
        except ApiError as error:
            self._give_up(error)
        except Exception:
            log.exception("request %s broke", self.life.request.request_id)
            self._give_up(internal_error())
        self._siblings.prompt_computed()
        self._sink.put(Ended(self.life.failure))

    def _give_up(self, cause: ApiError) -> None:
        if not self.life.is_over:
            for instruction in self.life.on(ev.GaveUp(cause), self._now_s()):
                if isinstance(instruction, ev.Show):  # what was held back is the client's
                    self._show(instruction)

    async def _judge(self) -> None:
        """Ends the request for the nodes that it has cost, unless some of them live."""
        outlived = await self._search.outlived(self.life.failures.unproven)
        for instruction in self.life.on(ev.Judged(outlived), self._now_s()):
            if self._attempt is not None:
                await self._obey(self._attempt, instruction)

    # ------------------------------------------------------------ calls

    async def _try_once(self) -> None:
        # Its time in the line does not count: clients have taken turns there, and nodes must not undo that.
        request = replace(
            self.life.shown.request_so_far,
            age_s=self._now_s() - self._admitted_s,
            token_gap_s=self._objectives.token_gap_s,
            client=client_number(self._permit.client),
        )
        attempt = self._attempt = Attempt(request)
        await self._run(attempt, self._placed(attempt))

    async def _run(self, attempt: Attempt, work: Coroutine[None, None, None]) -> None:
        """Follows the request through an attempt, and through those at the nodes to which it moves from there."""
        try:
            await work
        except BaseException:
            if attempt.successor is not None and attempt.successor.running is not None:
                attempt.successor.running.cancel()
                await asyncio.wait({attempt.successor.running})
            raise
        finally:
            self._search.course.end(self._now_s())
            self.life.report.routing = self._search.course.decision
            await attempt.cancel()
        if attempt.successor is not None and attempt.successor.running is not None:
            await attempt.successor.running

    async def _placed(self, attempt: Attempt) -> None:
        attempt.placement = placement = await self._search.place(
            attempt.request, is_suspect=self.life.failures.is_suspect
        )
        self._permit.placed()
        if placement.decode is not None:
            is_remote = placement.is_handed_over
            source = None if is_remote else await self._search.fetch_source(attempt.request, placement)
            await self._calls.decode(
                attempt, placement.decode, m.Start(attempt.request, is_remote, fetch_source=source)
            )
        else:
            attempt.prefill = attempt.spawn(self._calls.prefill(attempt, None, None))
            await attempt.over

    # ------------------------------------------------------------ moves

    def serves_on(self, node: NodeEntry) -> bool:
        """True while a call for this request may run on the node."""
        attempt = self._attempt
        if attempt is None or attempt.over.done():
            return False
        computes = attempt.prefill is not None and not attempt.prefill.done() and attempt.prefill_node is node
        sends = attempt.sender is not None and attempt.sender.decode_node is node
        return computes or sends or attempt.decode_node is node

    async def move(self, receiver: NodeEntry) -> MoveOutcome:
        """Moves the request to another decode node, with its blocks and state, and returns what has come of it."""
        attempt = self._attempt
        if self._move is not None or attempt is None or not relocation.may_relocate(self.life.state):
            return MoveOutcome.STAYED
        move = self._move = Move(receiver, self.life.report.moves, asyncio.get_running_loop().create_future())
        await self._handle(attempt, ev.MoveWanted())
        return await asyncio.shield(move.outcome)

    async def leave_nodes(self) -> None:
        """Begins again on other nodes, at once, with prompt and tokens so far."""
        if self._attempt is not None and not self.life.is_over:
            await self._handle(self._attempt, ev.NodeLeaves())

    async def _find_receiver(self, sender: Attempt) -> None:
        receiver = None if self._move is None else self._move.receiver
        if receiver is None or not self._search.may_still(receiver):
            await self._handle(sender, ev.NoReceiver())
            return
        whole = self.life.shown.request_so_far
        request = replace(sender.request, tokens=whole.tokens[:-1], sampling=whole.sampling)
        attempt = self._attempt = Attempt(request)
        start = m.Start(request, is_handed_over=True)
        sender.succeeded_by(attempt, self._run(attempt, self._calls.decode(attempt, receiver, start)))
        attempt.spawn(self._stay_unless_reserved(attempt))

    async def _stay_unless_reserved(self, attempt: Attempt) -> None:
        await asyncio.sleep(RESERVE_TIMEOUT_S)
        if attempt is self._attempt:
            await self._handle(attempt, ev.NoReceiver())

    async def _stay(self, attempt: Attempt) -> None:
        """Goes on at the sender of a move that has found no receiver."""
        sender = self._attempt = attempt.sender or attempt
        await sender.send(m.GoOn())
        if sender is not attempt:
            sender.forget_successor()

    def _settle_move(self) -> None:
        """Reports a move that is over, one way or the other."""
        move, life = self._move, self.life
        if move is None or relocation.is_relocating(life.state):
            return
        self._move = None
        if self._attempt is not None:
            self._attempt.sender_done()
        if move.settle(life) is MoveOutcome.RECOMPUTED:
            # Its state tells the causes apart: AwaitingRenewal after a transfer that failed, else Migrating. It may be
            # another one by the time that the move's caller goes on.
            log.warning(
                "request %s could not be handed over to %s: it is computed again (%s)",
                life.request.request_id,
                move.receiver.info.name,
                type(life.state).__name__,
            )

    # ------------------------------------------------------------ events and instructions

    async def _handle(self, attempt: Attempt, event: ev.Event) -> None:
        """Passes an event on and obeys. Drops events of an attempt that is over, except a prefill node's report."""
        is_late_report = isinstance(self.life.state, Completed) and isinstance(event, m.PrefillDone)
        if attempt.over.done() and not is_late_report:
            return
        now_s = self._now_s()
        if not relocation.is_relocating(self.life.state):
            self._search.course.on(event, now_s)
        for instruction in self.life.on(event, now_s):
            await self._obey(attempt, instruction)
        self._settle_move()
        if isinstance(event, _PROMPT_REPORTS):
            self._count_work(min(self.life.request.sampling.max_tokens, ANSWER_TOKENS))
        if self.life.has_computed_prompt:
            self._siblings.prompt_computed(attempt.prefill_node, attempt.decode_node)
        if self._stop_is_due():
            await self._handle(attempt, ev.StopFound())

    def _stop_is_due(self) -> bool:
        """True once: when the text has come to a stop string and its node generates on."""
        if not self._sink.is_complete or self._stop_is_handled or self.life.is_over:
            return False
        self._stop_is_handled = True
        return True

    def _take(self, attempt: Attempt, tokens: m.Tokens) -> None:
        """As `_handle`, at once, for tokens that ask for nothing but being shown: nearly all.

        Waking a task for each took a third of the router's time.
        """
        now_s = self._now_s()
        self._search.course.on(tokens, now_s)
        for instruction in self.life.on(tokens, now_s):
            if isinstance(instruction, ev.Show):
                self._show(instruction)
        if self._stop_is_due():
            attempt.spawn(self._handle(attempt, ev.StopFound()))

    async def _obey(self, attempt: Attempt, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Show():
                self._show(instruction)
            case ev.ShowPrompt():
                self._sink.put(instruction)
            case ev.StartPrefill(reservation, first_token):
                attempt.prefill = attempt.spawn(self._calls.prefill(attempt, reservation, first_token))
            case ev.SendRenew(failed_nonce):
                attempt.cancel_prefill()
                if attempt.prefill_node is not None:
                    self._search.transfer_failed(attempt.prefill_node)
                await attempt.send(m.Renew(failed_nonce))
            case ev.SendStop():
                await attempt.send(m.Stop())
            case ev.SendHalt():
                await attempt.send(m.Halt())
            case ev.FindReceiver():
                await self._find_receiver(attempt)
            case ev.SendHandOver(reservation):
                if attempt.sender is not None:
                    await attempt.sender.send(m.HandOver(reservation))
            case ev.SendGoOn():
                await self._stay(attempt)
            case ev.FailRequest(cause):
                if cause.code == NODE_CRASHED:
                    log.error("quarantined: %s; its shape: %s", cause.message, log_summary(self.life.request))
                attempt.end_all()
            case ev.StartOver() | ev.FinishRequest():
                attempt.end_all()
            case _:
                assert_never(instruction)

    def _show(self, shown: ev.Show) -> None:
        now_s, count = self._now_s(), len(shown.tokens)
        self._search.course.shown(count, now_s)
        if self._last_shown_s is None:
            self._context.metrics.first_token(now_s - self.life.entered_s[RequestPhase.QUEUED])
        else:
            self._context.metrics.next_tokens(count, now_s - self._last_shown_s)
        self._last_shown_s = now_s
        self._sink.put(shown)
