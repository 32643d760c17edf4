"""The choice of nodes for one request: avoids nodes that failed it, waits for busy ones, and finds what to fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire.errors import NodeError, NodeLost, NodeStopped
from headrace.wire.messages import FetchSource, Role
from router.cluster.fetch_sources import PromptKeys, choose_fetch_source
from router.cluster.nodes import NodeEntry, NodeId
from router.errors import no_node
from router.requests.context import RouterContext
from router.requests.siblings import Siblings

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # before a node that was busy or failed is asked again


class NodeSearch:
    """Nodes for one request, over all its attempts."""

    def __init__(self, context: RouterContext, request: Request, siblings: Siblings) -> None:
        self._context = context
        self._siblings = siblings
        self._request = request
        self._avoided: set[NodeId] = set()
        self._migrated_keys = PromptKeys()  # of the prompt with this request's own tokens

    def candidates(self, role: Role, receiver: NodeEntry | None = None) -> list[NodeEntry]:
        """Live nodes of this role; with a receiver, those that can transfer to it."""
        nodes = self._context.nodes
        return nodes.live(role) if receiver is None else nodes.senders_to(receiver.info, role)

    async def pick_decode_node(self) -> NodeEntry:
        """The node that has kept this request since its router was lost, or else the policy's choice.

        Waits for busy nodes as long as the request's own time allows, and for lost ones as long as they may come back;
        raises ApiError (503) when there is nobody to wait for.
        """
        holder = self._orphan_holder()
        if holder is not None:
            return holder
        nodes = self._context.nodes
        while (node := await self._pick(Role.DECODE, None)) is None:
            if not nodes.may_come(Role.DECODE):
                raise no_node(Role.DECODE, [], self._context.clock())
            await self._pause(Role.DECODE)
        return node

    async def pick_prefill_node(self, receiver: NodeEntry | None) -> NodeEntry | None:
        """The policy's choice, if possible among those that reach the receiver. Waits for busy nodes; None when no
        prefill node is there: the decode nodes can compute prompts."""
        return await self._pick(Role.PREFILL, receiver)

    def _orphan_holder(self) -> NodeEntry | None:
        """The decode node that goes on with this request since its router was lost; None: there is none."""
        if not self._request.is_resumable:
            return None
        request_id = self._request.request_id
        holders = (node for node in self.candidates(Role.DECODE) if request_id in node.status.orphans)
        return next((node for node in holders if node.id not in self._avoided), None)

    async def _pick(self, role: Role, receiver: NodeEntry | None) -> NodeEntry | None:
        """One of the candidates that have not failed this request; when all have, any of them, after a pause. None when
        there are no candidates."""
        while live := {node.info.name: node for node in self.candidates(role, receiver)}:
            fresh = [node for node in live.values() if node.id not in self._avoided]
            if fresh:
                reaching = [node for node in fresh if receiver is None or node.reaches(receiver.info)]
                return self._choose(role, reaching or fresh)
            await self._pause(role)
            self._avoided -= {node.id for node in live.values()}
        return None

    def _choose(self, role: Role, nodes: Sequence[NodeEntry]) -> NodeEntry:
        """The node that has the blocks of the request's siblings, or else the policy's choice."""
        by_name = {node.info.name: node for node in nodes}
        for node in nodes:
            if node.id == self._siblings.nodes.get(role):
                return node
        infos = [node.info for node in nodes]
        return by_name[self._context.policies[role].pick(infos, self._request).name]

    async def _pause(self, role: Role) -> None:
        with self._context.metrics.waiting_for_node(role):
            await asyncio.sleep(RETRY_PAUSE_S)

    def call_failed(self, node: NodeEntry, error: NodeError) -> NodeError:
        """Avoids the node from now on; marks it as suspect if it was lost. Returns the error as it counts: a node that
        has left cuts its last calls off without a word, which is no loss."""
        log.info("request %s: %s", self._request.request_id, error)
        self._avoided.add(node.id)
        if isinstance(error, NodeLost):
            node.suspect = True
        return NodeStopped(error.node, error.message) if type(error) is NodeLost and node.has_left else error

    def transfer_failed(self, sender: NodeEntry) -> None:
        """Avoids a sender whose failure the receiver may have reported: a stopped process reports nothing itself."""
        self._avoided.add(sender.id)

    # ------------------------------------------------------------ the prompt in the cluster's caches

    async def fetch_source(self, request: Request, prefill_node: NodeEntry) -> FetchSource | None:
        """A live node that may hold more of the prompt than the prefill node does."""
        nodes, index = self._context.nodes, self._context.index
        keys = await self.prompt_keys(request)
        if keys is None:
            return None
        max_tokens = len(request.tokens) - 1  # at least one token is always computed
        hits = index.match(keys, max_tokens=max_tokens, receiver_block_size=prefill_node.info.layout.block_size)
        senders = (node for node in nodes.senders_to(prefill_node.info) if node.reaches(prefill_node.info))
        holders = [(node.info, hits[node.id]) for node in senders if node.id in hits]
        return choose_fetch_source(holders, hits.get(prefill_node.id))

    async def prompt_keys(self, request: Request) -> Mapping[int, Sequence[PrefixKey]] | None:
        """The prompt's keys by block size, hashed once; None when there is no cache to look them up in."""
        index = self._context.index
        if not self._context.config.fetch_from_decode or not len(index):
            return None
        is_prompt = len(request.tokens) == request.num_prompt_tokens
        keys = self._siblings.keys if is_prompt else self._migrated_keys
        return await keys.of(request, index.block_sizes)
