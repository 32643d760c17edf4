"""Drives requests through the nodes: opens the calls, passes events to the table, obeys its instructions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire import messages as m
from headrace.wire.client import DecodeCall
from headrace.wire.errors import NodeBusy, NodeError, NodeLost
from router.cluster.cluster_index import ClusterIndex
from router.cluster.fetch_sources import PromptKeys, choose_fetch_source
from router.cluster.nodes import NodeEntry, NodeId, NodeTable
from router.cluster.policy import Policy
from router.config import RouterConfig
from router.errors import ApiError, deadline_passed, overloaded
from router.metrics import RouterMetrics
from router.requests import events as ev
from router.requests.admission import AdmissionPermit
from router.requests.lifecycle import RequestLife
from router.requests.states import RequestPhase
from router.requests.table import RequestTable

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # before a node that was busy or failed is asked again
REPORT_GRACE_S = 1.0  # what a prefill node gets for its report when the answer is complete


@dataclass(frozen=True)
class Ended:
    """The last output of a request; `failure` None: it is done."""

    failure: ApiError | None


Output = ev.Show | ev.ShowPrompt | Ended


@dataclass(frozen=True)
class RouterContext:
    """The parts of a router that every request's driver uses.

    policies   one object a role, since each keeps its own turn
    clock      yields seconds
    """

    config: RouterConfig
    nodes: NodeTable
    table: RequestTable
    policies: Mapping[m.Role, Policy]
    metrics: RouterMetrics
    index: ClusterIndex
    clock: Callable[[], float]


class Attempt:
    """One decode call with the prefill calls for it, or one prefill call alone.

    `over` is done when the attempt has nothing more to do, or holds the exception of a task that broke.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: DecodeCall | None = None
        self.decode_node: NodeEntry | None = None
        self.prefill: asyncio.Task[None] | None = None
        self.prefill_node: NodeEntry | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.over.done():
            self.over.set_exception(error)

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def send(self, command: m.DecodeCommand) -> None:
        """Sends to the decode node; a lost node is noticed by whoever reads its events."""
        if self.call is not None:
            with contextlib.suppress(NodeError):
                await self.call.send(command)

    async def cancel(self) -> None:
        """Cancels the calls and waits until they are left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RequestDriver:
    """One request on its way through the nodes. Leaving the `async with` block cancels what still runs."""

    def __init__(
        self, context: RouterContext, request: Request, permit: AdmissionPermit, show: Callable[[Output], None]
    ) -> None:
        self._context = context
        self._permit = permit
        self._now_s = context.clock
        self._deadline_s = context.clock() + context.config.request_timeout_s
        self._show = show
        self._avoid: set[NodeId] = set()
        self._patience_ends_s: float | None = None
        self._attempt: Attempt | None = None
        self._prompt_keys = PromptKeys()
        self._last_shown_s: float | None = None
        self.life: RequestLife = context.table.open(request, context.clock())

    async def __aenter__(self) -> RequestDriver:
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)
        self._permit.release()
        if not self.life.is_over:
            cause = ApiError(HTTPStatus.REQUEST_TIMEOUT, "the client left", code="client_left")
            self.life.on(ev.GaveUp(cause), self._now_s())
        self._context.metrics.request_ended(self._context.table.close(self.life.request.request_id))

    async def stop(self) -> None:
        """The client's text is complete: the end comes when the decode node has reported."""
        attempt = self._attempt
        if attempt is not None and not self.life.is_over:
            await self._tell(attempt, ev.StopFound())

    # ------------------------------------------------------------ the driver

    async def _drive(self) -> None:
        timeout_s = self._context.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._permit:
                while not self.life.is_over:
                    await self._try_once()
        except TimeoutError:
            self._give_up(deadline_passed(timeout_s))
        except ApiError as error:
            self._give_up(error)
        except Exception:
            log.exception("request %s broke", self.life.request.request_id)
            self._give_up(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error of the router"))
        self._show(Ended(self.life.failure))

    def _give_up(self, cause: ApiError) -> None:
        if not self.life.is_over:
            self.life.on(ev.GaveUp(cause), self._now_s())

    async def _try_once(self) -> None:
        attempt = self._attempt = Attempt(self.life.request_so_far)
        try:
            if self.life.needs_decode or not self._context.nodes.live(m.Role.PREFILL):
                await self._on_decode_node(attempt)
            else:
                attempt.prefill = attempt.spawn(self._prefill(attempt, None, None))
                await attempt.over
        finally:
            await attempt.cancel()

    async def _on_decode_node(self, attempt: Attempt) -> None:
        node = attempt.decode_node = await self._pick(m.Role.DECODE)
        may_prefill_remotely = self.life.needs_decode and bool(self._context.nodes.senders_to(node.info))
        start = m.Start(attempt.request, may_prefill_remotely)
        try:
            async with (
                self._context.nodes.in_use(node) as client,
                client.decode(start, timeout_s=self._remaining_s()) as call,
            ):
                attempt.call = call
                await self._tell(attempt, ev.DecodeStarted(node.info.name))
                attempt.spawn(self._read(attempt, node, call))
                if start.may_prefill_remotely:
                    await self._keys(attempt.request)  # the decode node reserves meanwhile
                await attempt.over
                if self.life.phase is RequestPhase.DONE and attempt.prefill is not None:
                    # The client has every token; only the final usage waits for this.
                    await asyncio.wait({attempt.prefill}, timeout=REPORT_GRACE_S)
                await attempt.cancel()
        except NodeError as error:  # the call could not even be opened
            self._note_failure(node, error)
            await self._tell(attempt, ev.DecodeLost(error))

    async def _read(self, attempt: Attempt, node: NodeEntry, call: DecodeCall) -> None:
        try:
            async for event in call:
                await self._tell(attempt, event)
                if isinstance(event, m.DecodeDone) or attempt.over.done():
                    return
            raise NodeLost(node.info.name, "ended the call before the request was done")
        except NodeError as error:
            self._note_failure(node, error)
            await self._tell(attempt, ev.DecodeLost(error))

    async def _prefill(self, attempt: Attempt, reservation: m.Reservation | None, first_token: int | None) -> None:
        nonce = None if reservation is None else reservation.nonce
        receiver = None if reservation is None else attempt.decode_node
        if not self._candidates(m.Role.PREFILL, receiver):
            await self._tell(attempt, ev.PrefillFailed(nonce, None))
            return
        node = attempt.prefill_node = await self._pick(m.Role.PREFILL, receiver)
        fetch_source = await self._fetch_source(attempt.request, node)
        work = m.PrefillRequest(attempt.request, reservation, first_token, fetch_source)
        try:
            async with (
                self._context.nodes.in_use(node) as client,
                client.prefill(work, timeout_s=self._remaining_s()) as call,
            ):
                await self._tell(attempt, ev.PrefillStarted(node.info.name, nonce))
                async for event in call:
                    await self._tell(attempt, event)
                    if isinstance(event, m.PrefillDone):
                        if nonce is not None:
                            attempt.spawn(self._expect_landing(attempt, node, nonce))
                        return
            raise NodeLost(node.info.name, "ended the call before the prefill was done")
        except NodeError as error:
            self._note_failure(node, error)
            await self._tell(attempt, ev.PrefillFailed(nonce, error))

    async def _expect_landing(self, attempt: Attempt, node: NodeEntry, nonce: int) -> None:
        """What was handed over lands by then, or not as it was sent: bytes that a network damages can pass for a
        stranger's, which the decode node ignores while it waits for the session's own until the session's deadline."""
        timeout_s = self._context.config.landing_timeout_s
        await asyncio.sleep(timeout_s)
        lost = NodeError(node.info.name, f"what it handed over did not land in {timeout_s:g} s (landing_timeout_s)")
        await self._tell(attempt, ev.PrefillFailed(nonce, lost))

    async def _fetch_source(self, request: Request, prefill_node: NodeEntry) -> m.FetchSource | None:
        """A live decode node that may hold more of the prompt than the node that is to compute it."""
        nodes, index = self._context.nodes, self._context.index
        keys = await self._keys(request)
        if keys is None:
            return None
        max_tokens = len(request.tokens) - 1  # one is always computed
        hits = index.match(keys, max_tokens=max_tokens, receiver_block_size=prefill_node.info.layout.block_size)
        fetch_sources = (node for node in nodes.senders_to(prefill_node.info) if node.reaches(prefill_node.info))
        holders = [(node.info, hits[node.id]) for node in fetch_sources if node.id in hits]
        return choose_fetch_source(holders, hits.get(prefill_node.id))

    async def _keys(self, request: Request) -> Mapping[int, Sequence[PrefixKey]] | None:
        """The prompt's keys by block size, hashed once; None when no node's cache is known to look for them in."""
        index = self._context.index
        if not self._context.config.fetch_from_decode or not len(index):
            return None
        return await self._prompt_keys.of(request, index.block_sizes)

    # ------------------------------------------------------------ events and instructions

    async def _tell(self, attempt: Attempt, event: ev.Event) -> None:
        """Passes an event on, and obeys. A late event of an attempt that is over is dropped."""
        if attempt.over.done() and not (self.life.phase is RequestPhase.DONE and isinstance(event, m.PrefillDone)):
            return
        for instruction in self._context.table.on(self.life.request.request_id, event, self._now_s()):
            match instruction:
                case ev.Show(tokens):
                    self._note_tokens(len(tokens))
                    self._show(instruction)
                case ev.ShowPrompt():
                    self._show(instruction)
                case ev.StartPrefill(reservation, first_token):
                    attempt.prefill = attempt.spawn(self._prefill(attempt, reservation, first_token))
                case ev.SendRenew(failed_nonce):
                    if attempt.prefill is not None and attempt.prefill is not asyncio.current_task():
                        attempt.prefill.cancel()
                    if attempt.prefill_node is not None and attempt.prefill_node.id not in self._avoid:
                        # It was the decode node that said so: a stopped sender says nothing itself.
                        self._avoid.add(attempt.prefill_node.id)
                        self._patience_ends_s = None
                    await attempt.send(m.Renew(failed_nonce))
                case ev.SendStop():
                    await attempt.send(m.Stop())
                case ev.StartOver() | ev.FinishRequest() | ev.FailRequest():
                    attempt.end()

    def _note_tokens(self, count: int) -> None:
        now_s = self._now_s()
        if self._last_shown_s is None:
            self._context.metrics.first_token(now_s - self.life.entered_s[RequestPhase.QUEUED])
        else:
            self._context.metrics.next_tokens(count, now_s - self._last_shown_s)
        self._last_shown_s = now_s
        self._patience_ends_s = None

    # ------------------------------------------------------------ nodes

    def _candidates(self, role: m.Role, receiver: NodeEntry | None) -> list[NodeEntry]:
        """Live nodes of this role; with a receiver, those that can hand over to it."""
        nodes = self._context.nodes
        return nodes.live(role) if receiver is None else nodes.senders_to(receiver.info)

    async def _pick(self, role: m.Role, receiver: NodeEntry | None = None) -> NodeEntry:
        """A candidate that has not failed this request, if possible one that reaches the receiver; or else any after a
        pause.

        Raises ApiError (503) when patience with busy or missing nodes ends.
        """
        while True:
            live = {node.info.name: node for node in self._candidates(role, receiver)}
            fresh = [node.info for node in live.values() if node.id not in self._avoid]
            if fresh:
                reaching = [info for info in fresh if receiver is None or live[info.name].reaches(receiver.info)]
                return live[self._context.policies[role].pick(reaching or fresh, self.life.request).name]
            if self._patience_ends_s is None:
                self._patience_ends_s = self._now_s() + self._context.config.busy_timeout_s
            if self._now_s() >= self._patience_ends_s:
                state = "stayed busy" if live else "was there"
                subject = "every" if live else "no"
                raise overloaded(
                    f"{subject} {role.value} node {state} for {self._context.config.busy_timeout_s:g} s "
                    "(busy_timeout_s); try again later"
                )
            await asyncio.sleep(RETRY_PAUSE_S)
            self._avoid -= {node.id for node in live.values()}

    def _note_failure(self, node: NodeEntry, error: NodeError) -> None:
        log.info("request %s: %s", self.life.request.request_id, error)
        self._avoid.add(node.id)
        if isinstance(error, NodeLost):
            node.suspect = True
        if not isinstance(error, NodeBusy):
            self._patience_ends_s = None  # it had room: time spent working is no time spent waiting for room
        elif self._patience_ends_s is None:
            self._patience_ends_s = self._now_s() + self._context.config.busy_timeout_s

    def _remaining_s(self) -> float:
        return max(self._deadline_s - self._now_s(), 0.001)
