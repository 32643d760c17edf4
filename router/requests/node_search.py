"""The choice of nodes for one request: avoids nodes that failed it, waits for busy ones, and finds what to fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire.errors import NodeBusy, NodeError, NodeLost
from headrace.wire.messages import FetchSource, Role
from router.cluster.fetch_sources import PromptKeys, choose_fetch_source
from router.cluster.nodes import NodeEntry, NodeId
from router.errors import overloaded
from router.requests.context import RouterContext

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # before a node that was busy or failed is asked again


class NodeSearch:
    """Nodes for one request, over all its attempts."""

    def __init__(self, context: RouterContext, request: Request) -> None:
        self._context = context
        self._request = request
        self._avoided: set[NodeId] = set()
        self._patience_ends_s: float | None = None
        self._prompt_keys = PromptKeys()

    def candidates(self, role: Role, receiver: NodeEntry | None = None) -> list[NodeEntry]:
        """Live nodes of this role; with a receiver, those that can transfer to it."""
        nodes = self._context.nodes
        return nodes.live(role) if receiver is None else nodes.senders_to(receiver.info)

    async def pick(self, role: Role, receiver: NodeEntry | None = None) -> NodeEntry:
        """The policy's choice among the candidates that have not failed this request, if possible those that reach the
        receiver. When all have failed it: any of them, after a pause.

        Raises ApiError (503) when nodes were busy or missing for `busy_timeout_s`.
        """
        while True:
            live = {node.info.name: node for node in self.candidates(role, receiver)}
            fresh = [node.info for node in live.values() if node.id not in self._avoided]
            if fresh:
                reaching = [info for info in fresh if receiver is None or live[info.name].reaches(receiver.info)]
                return live[self._context.policies[role].pick(reaching or fresh, self._request).name]
            self._start_patience()
            if self._patience_ends_s is not None and self._context.clock() >= self._patience_ends_s:
                state = "stayed busy" if live else "was there"
                subject = "every" if live else "no"
                raise overloaded(
                    f"{subject} {role.value} node {state} for {self._context.config.busy_timeout_s:g} s "
                    "(busy_timeout_s); try again later"
                )
            await asyncio.sleep(RETRY_PAUSE_S)
            self._avoided -= {node.id for node in live.values()}

    def call_failed(self, node: NodeEntry, error: NodeError) -> None:
        """Avoids the node from now on; marks it as suspect if it was lost."""
        log.info("request %s: %s", self._request.request_id, error)
        self._avoided.add(node.id)
        if isinstance(error, NodeLost):
            node.suspect = True
        if isinstance(error, NodeBusy):
            self._start_patience()
        else:  # the node had capacity: the time that it worked is no time spent waiting for capacity
            self.made_progress()

    def transfer_failed(self, sender: NodeEntry) -> None:
        """Avoids a sender whose failure the receiver may have reported: a stopped process reports nothing itself."""
        if sender.id not in self._avoided:
            self._avoided.add(sender.id)
            self.made_progress()

    def made_progress(self) -> None:
        """Restarts the patience with busy or missing nodes."""
        self._patience_ends_s = None

    def _start_patience(self) -> None:
        if self._patience_ends_s is None:
            self._patience_ends_s = self._context.clock() + self._context.config.busy_timeout_s

    # ------------------------------------------------------------ the prompt in the cluster's caches

    async def fetch_source(self, request: Request, prefill_node: NodeEntry) -> FetchSource | None:
        """A live decode node that may hold more of the prompt than the prefill node does."""
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
        return await self._prompt_keys.of(request, index.block_sizes)
