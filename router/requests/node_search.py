"""The choice of nodes for one request: asks the policy, avoids nodes that failed the request, waits for busy ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product

from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire.errors import NodeError, NodeLost, NodeStalled, NodeStopped
from headrace.wire.messages import FetchSource
from headrace.wire.node_messages import Role
from router.cluster.node_id import NodeId
from router.cluster.nodes import NodeEntry
from router.errors import no_node, objectives_missed
from router.requests.context import RouterContext
from router.requests.course import Course
from router.requests.host_deaths import HostDeaths
from router.requests.inquest import has_outlived
from router.requests.prompt_keys import PromptKeys
from router.requests.siblings import Siblings
from router.routing.decisions import Decision
from router.routing.plan import NO_OBJECTIVES, Objectives, Plan, RoutedRequest
from router.routing.snapshots import ANYWHERE, Pins

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # before a node that was busy or failed is asked again


@dataclass(frozen=True)
class Placement:
    """A plan with its nodes. `number`: the decision's. `decode` None: the first token is enough."""

    number: int
    plan: Plan
    prefill: NodeEntry
    decode: NodeEntry | None

    @property
    def is_handed_over(self) -> bool:
        return self.decode is not self.prefill


class NodeSearch:
    """Nodes for one request, over all its attempts."""

    def __init__(
        self,
        context: RouterContext,
        request: Request,
        siblings: Siblings,
        objectives: Objectives = NO_OBJECTIVES,
        session: str = "",
    ) -> None:
        self._context = context
        self._session = session
        self._arrived_s = context.clock()
        self._objectives = objectives
        self._siblings = siblings
        self._request = request
        self._avoided: set[NodeId] = set()
        self._lost: dict[str, set[NodeId]] = {}
        self._host_deaths = HostDeaths()
        self._migrated_keys = PromptKeys()  # of the prompt with this request's own tokens
        self._was_placed = False
        self.course = Course(context.ledger, context.decisions, context.metrics)

    async def place(self, request: Request, *, is_suspect: bool) -> Placement:
        """The policy's plan, on the node that has kept this request since its router was lost, or where its siblings
        are, if they are there.

        A suspect request may be what ended a node: it waits until another one has outlived that node's host, or is
        elsewhere, or that node itself turns out to live. Waits for busy nodes as long as the request's own time allows,
        and for lost ones as long as they may come back; raises ApiError: 503 when there is nobody to wait for, 429 for
        a request that would miss its objectives.
        """
        nodes = self._context.nodes
        async with self._inquest(is_suspect=is_suspect):
            while True:
                holder = self._orphan_holder()
                pins, cause = self._siblings_pins(), "retry" if self._was_placed else "request"
                if holder is not None:
                    pins, cause = Pins(decode=holder.info.name), "orphan"
                elif pins != ANYWHERE:
                    cause = "sibling"
                if (placement := await self._ask(request, pins, cause, is_suspect)) is not None:
                    if cause == "request":
                        self._check_objectives(placement.plan)
                    self._was_placed = True
                    return placement
                if not nodes.live(Role.DECODE) and not nodes.may_come(Role.DECODE):
                    raise no_node(Role.DECODE, [], self._context.clock())
                await self._pause()

    async def place_prefill(self, request: Request, receiver: NodeEntry, *, is_suspect: bool) -> Placement | None:
        """A plan for a prompt that `receiver` waits for. Waits for busy nodes; None when nobody can send to it."""
        pins = Pins(prefill=self._siblings_pins().prefill, decode=receiver.info.name, is_reserved=True)
        async with self._inquest(is_suspect=is_suspect):
            while self._context.nodes.senders_to(receiver.info, Role.PREFILL):
                if (placement := await self._ask(request, pins, "renewal", is_suspect)) is not None:
                    self._context.ledger.reserved(placement.number)
                    return placement
                await self._pause()
        return None

    @asynccontextmanager
    async def _inquest(self, *, is_suspect: bool) -> AsyncIterator[None]:
        """Asks the lost nodes for which a suspect request waits in the block: the host of one that lives, and was only
        out of reach, is not dying."""
        lost = self._host_deaths.lost_nodes(self._context.clock()) if is_suspect else []
        asking = [asyncio.create_task(self._ask_lost(node)) for node in lost]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask_lost(self, node: NodeId) -> None:
        if await has_outlived(self._context.nodes, node):
            self._host_deaths.node_lives(node)

    async def _ask(self, request: Request, pins: Pins, cause: str, is_suspect: bool) -> Placement | None:
        """The policy's plan among the nodes that have not failed this request; None: there is no such plan.

        Nodes whose hosts may be dying are left out, too. If the policy then finds no plan, they are taken after all,
        but not for a suspect request, which waits. When there is no plan, the nodes that have failed the request are
        avoided no longer, except those on whose hosts a suspect request waits.
        """
        context = self._context
        keys = await self.prompt_keys(request)
        now_s = context.clock()
        live = {node.info.name: node for node in context.nodes.live()}
        roles = {name: node.role for name, node in live.items()}
        avoided = {name for name, node in live.items() if node.id in self._avoided}
        dying = {name for name, node in live.items() if self._host_deaths.may_include(node.info, now_s)}
        routed = self._routed(request, context.snapshots.caches_are_short(roles))
        waits_for = dying if is_suspect else set()
        left_out = [avoided | dying] if is_suspect or not dying else [avoided | dying, avoided]
        pinned = [pins, Pins(decode=pins.decode, is_reserved=True) if pins.is_reserved else ANYWHERE]
        for names, its_pins in product(left_out, pinned):
            candidates = context.snapshots.take(roles, keys, len(request.tokens), now_s, avoided=names, pins=its_pins)
            if (plan := context.policy.choose(routed, candidates)) is not None:
                decision = Decision(routed, cause, plan, candidates)
                context.sessions.served(self._session, plan.decode, plan.prefill)
                self.course.decided(request, decision, candidates, keys, now_s)
                decode = None if plan.decode is None else live[plan.decode]
                return Placement(routed.number, plan, live[plan.prefill], decode)
        self._avoided -= {node.id for name, node in live.items() if name not in waits_for}
        return None

    def _check_objectives(self, plan: Plan) -> None:
        """Raises ApiError (429) for a request that keeps its objectives nowhere, if those are to be refused."""
        config = self._context.config
        if config.on_missed_objectives == "refuse" and plan.relief_s > 0:
            raise objectives_missed(
                self._objectives.first_token_s,
                self._objectives.token_gap_s,
                first_token_in_s=plan.prediction.first_token_s,
                relief_s=min(plan.relief_s, config.request_timeout_s),
            )

    def _routed(self, request: Request, caches_are_short: bool) -> RoutedRequest:
        sampling = request.sampling
        return RoutedRequest(
            number=next(self._context.numbers),
            num_tokens=len(request.tokens),
            answer_tokens=self._context.answers.expected(
                sampling.max_tokens, len(request.tokens) - request.num_prompt_tokens
            ),
            needs_decode=sampling.max_tokens > 1,
            waited_s=self._context.clock() - self._arrived_s,
            is_scored=sampling.prompt_logprobs is not None,
            may_fetch=self._context.config.fetch_from_others,
            objectives=self._objectives,
            session_nodes=self._context.sessions.nodes_of(self._session),
            caches_are_short=caches_are_short,
        )

    def _orphan_holder(self) -> NodeEntry | None:
        """The decode node that goes on with this request since its router was lost; None: there is none."""
        if not self._request.is_resumable:
            return None
        request_id = self._request.request_id
        holders = (node for node in self._context.nodes.live() if request_id in node.status.orphans)
        return next((node for node in holders if node.id not in self._avoided), None)

    def _siblings_pins(self) -> Pins:
        """The nodes of the request's siblings, as far as they are there and have not failed it."""
        live = self._context.nodes.live()
        there = {node.id: node.info.name for node in live if node.id not in self._avoided}
        prefill, decode = (there.get(node_id) if node_id else None for node_id in self._siblings.nodes)
        return Pins(prefill, decode)

    async def _pause(self) -> None:
        decode_nodes = self._context.nodes.live(Role.DECODE)
        is_free = any(node.id not in self._avoided for node in decode_nodes)
        with self._context.metrics.waiting_for_node(Role.PREFILL if is_free else Role.DECODE):
            await asyncio.sleep(RETRY_PAUSE_S)

    def call_failed(self, node: NodeEntry, error: NodeError) -> NodeError:
        """Avoids the node from now on; marks it as suspect if it was lost. Returns the error as it counts: a node that
        has left cuts its last calls off without a word, which is no loss."""
        log.info("request %s: %s", self._request.request_id, error)
        self._avoided.add(node.id)
        if isinstance(error, NodeLost):
            node.suspect = True
        if type(error) not in (NodeLost, NodeStalled):
            return error
        if node.has_left:
            return NodeStopped(error.node, error.message)
        self._lost.setdefault(node.info.name, set()).add(node.id)
        self._host_deaths.node_lost(node.info, self._context.clock())
        return error

    async def outlived(self, names: Collection[str]) -> frozenset[str]:
        """Names among these of nodes that this request has lost and that live: each process that had the name."""
        asked = sorted((name, lost) for name in self._lost.keys() & set(names) for lost in self._lost[name])
        live = await asyncio.gather(*(has_outlived(self._context.nodes, lost) for _, lost in asked))
        dead = {name for (name, _), lives in zip(asked, live, strict=True) if not lives}
        found = frozenset(name for name, _ in asked) - dead
        if found:
            log.warning(
                "request %s: its nodes %s live, only their connections were lost",
                self._request.request_id,
                ", ".join(sorted(found)),
            )
        return found

    def transfer_failed(self, sender: NodeEntry) -> None:
        """Avoids a sender whose failure the receiver may have reported: a stopped process reports nothing itself."""
        self._avoided.add(sender.id)

    def may_still(self, node: NodeEntry) -> bool:
        """True if a node that was planned for this request can be asked: it lives, and has not failed it meanwhile."""
        return node.id not in self._avoided and any(each is node for each in self._context.nodes.live())

    # ------------------------------------------------------------ the prompt in the cluster's caches

    async def fetch_source(self, request: Request, placement: Placement) -> FetchSource | None:
        """The plan's node to fetch from, if it still holds more of the prompt than the prefill node does."""
        nodes, index, receiver = self._context.nodes, self._context.index, placement.prefill
        source = next((node for node in nodes.all() if node.info.name == placement.plan.fetch_from), None)
        if source is None:
            return None
        keys = await self.prompt_keys(request)
        max_tokens = len(request.tokens) - 1  # at least one token is always computed
        hits = index.match(keys, max_tokens=max_tokens, receiver_block_size=receiver.info.layout.block_size)
        if source.id not in hits:
            return None
        num_tokens = hits[source.id].state_tokens
        own_tokens = hits[receiver.id].resumable_tokens if receiver.id in hits else 0
        if num_tokens <= own_tokens:
            return None
        return FetchSource(source.info.name, source.info.address, num_tokens, source.info.layout.block_size)

    async def prompt_keys(self, request: Request) -> Mapping[int, Sequence[PrefixKey]]:
        """The prompt's keys by block size, hashed once; empty when there is no cache to look them up in."""
        is_prompt = len(request.tokens) == request.num_prompt_tokens
        keys = self._siblings.keys if is_prompt else self._migrated_keys
        return await keys.of(request, self._context.index.block_sizes, self._context.known_prompts)
