"""Fetching what a decode node holds of a prompt: the hand-over in the other direction.

This node reserves (its sequence holds blocks for the whole prompt and a slot), the decode node sends the blocks
beyond this node's attention hit and its checkpoint's state. What lands is verified and then published here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

from headrace.cache.conversion import BlockConversion
from headrace.cache.types import PrefixKey
from headrace.engine.sequence import Admitted, Sequence
from headrace.wire.client import FetchClient
from headrace.wire.errors import (
    CheckpointGone,
    DeadlineExceeded,
    NodeBusy,
    NodeError,
    NodeLost,
    RequestRefused,
    TransferBroken,
)
from headrace.wire.messages import FetchRequest, FetchSource, PrefillRequest
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import reserve
from prefill_node.config import FetchConfig
from prefill_node.fetch_channels import FetchChannels
from prefill_node.fetch_costs import MeasuredCosts
from prefill_node.fetch_policy import FetchPolicy
from transfer.protocol.errors import LayoutMismatch, TransferFailed
from transfer.protocol.events import Cause
from transfer.protocol.stats import TransferStats
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.transfer import PIPELINE_DEPTH

log = logging.getLogger(__name__)

_CAUSES: dict[type[NodeError], str] = {
    CheckpointGone: "gone",
    RequestRefused: "refused",
    TransferBroken: "transfer_broken",
    NodeBusy: "busy",
    NodeLost: "fetch_source_lost",
    DeadlineExceeded: "deadline",
}


class FetchFailed(Exception):
    """Nothing of this fetch may be used: the prompt is computed. `cause` is of `_CAUSES`, or the session's `Cause`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class Fetch:
    """One fetch under way. Whoever opened it calls `end` before the sequence's blocks go to anyone else.

    saved_tokens   what need not be computed once it has landed
    """

    def __init__(
        self,
        runtime: NodeRuntime,
        incoming: IncomingTransfer,
        client: FetchClient,
        fetch_source: FetchSource,
        fetch: FetchRequest,
        deadline_s: float,
        saved_tokens: int,
    ) -> None:
        self.fetch_source = fetch_source
        self.saved_tokens = saved_tokens
        self._runtime = runtime
        self._incoming = incoming
        self._client = client
        self._export = fetch
        self._deadline_s = deadline_s

    async def landed(self) -> TransferStats:
        """Until blocks and state are in their places, verified. Raises FetchFailed, by the deadline at the latest."""
        timeout_s = self._deadline_s - asyncio.get_running_loop().time()
        try:
            reply = await self._client.fetch(self._export, timeout_s=max(timeout_s, 0.001))
            self._runtime.require_layout(reply.layout)
            return (await self._incoming.landed()).stats
        except NodeError as error:
            raise FetchFailed(_CAUSES[type(error)], str(error)) from error
        except LayoutMismatch as error:
            raise FetchFailed("refused", str(error)) from error
        except TransferFailed as error:
            raise FetchFailed(error.cause, str(error)) from error

    async def end(self) -> None:
        """Cancels it unless it has landed. Nothing lands any more when this returns."""
        self._incoming.cancel()
        with suppress(TransferFailed):
            await self._incoming.landed()


class Fetches:
    """All fetches of one prefill node: its lines to decode nodes, what they cost, and their counts."""

    def __init__(
        self, runtime: NodeRuntime, config: FetchConfig, connect: Callable[[FetchSource], FetchClient]
    ) -> None:
        self.costs = MeasuredCosts()
        self._runtime = runtime
        self._config = config
        self._channels = FetchChannels(connect, asyncio.get_running_loop().time, runtime.spawn, config.timeout_s)
        self._declined = 0
        self._landed = 0
        self._tokens = 0
        self._bytes = 0
        self._failures = dict.fromkeys((*_CAUSES.values(), *map(str, Cause)), 0)

    def counters(self) -> dict[str, float]:
        return {
            "fetches": float(self._landed),
            "fetches_declined": float(self._declined),
            "fetched_tokens": float(self._tokens),
            "fetched_bytes": float(self._bytes),
            **{f"cause={cause}/fetch_failures": float(count) for cause, count in self._failures.items()},
        }

    def policy(self, request: PrefillRequest) -> FetchPolicy:
        """Of one request, by what is known now of the costs."""
        return FetchPolicy(
            config=self._config,
            costs=self.costs.now,
            layout=self._runtime.wire_layout,
            num_tokens=len(request.request.tokens),
            fetch_source_tokens=None if request.fetch_source is None else request.fetch_source.num_tokens,
            is_scored=request.request.sampling.prompt_logprobs is not None,
        )

    def declined(self) -> None:
        """There was a fetch source, and computing was estimated to take less time."""
        self._declined += 1
        self.costs.declined()

    def open(self, sequence: Sequence, fetch_source: FetchSource, admitted: Admitted, deadline_s: float) -> Fetch:
        """Expects the fetch source's messages; `sequence` has been admitted to wait for them. Raises FetchFailed.

        deadline_s   the request's, on the event loop's clock: a fetch has its own, which is shorter
        """
        deadline_s = min(deadline_s, asyncio.get_running_loop().time() + self._config.timeout_s)
        try:
            reservation, incoming = reserve(
                self._runtime,
                self._receiver,
                sequence,
                admitted,
                num_tokens=fetch_source.num_tokens,
                deadline_s=deadline_s,
            )
        except LayoutMismatch as error:
            failure = FetchFailed("refused", str(error))
            self._count(failure)
            raise failure from error
        fetch = FetchRequest(_fetch_source_key(sequence, fetch_source), reservation)
        saved_tokens = fetch_source.num_tokens - admitted.hit.resumable_tokens
        return Fetch(
            self._runtime, incoming, self._channels.to(fetch_source), fetch_source, fetch, deadline_s, saved_tokens
        )

    async def run(self, fetch: Fetch) -> None:
        """Until it has landed, counted either way. Raises FetchFailed; nothing lands any more then."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            stats = await fetch.landed()
        except FetchFailed as failure:
            await fetch.end()
            if failure.cause == "fetch_source_lost":
                self._channels.disconnect(fetch.fetch_source.address)
            self.costs.failed(clock() - began_s)
            self._count(failure)
            raise
        num_bytes = stats.attention_bytes + stats.state_bytes
        self.costs.fetched(num_bytes, stats.seconds, clock() - began_s)
        self._landed += 1
        self._tokens += fetch.saved_tokens
        self._bytes += num_bytes

    def _count(self, failure: FetchFailed) -> None:
        self._failures[failure.cause] += 1
        log.info("computes what could not be fetched: %s", failure)

    async def close(self) -> None:
        await self._channels.close()

    @cached_property
    def _receiver(self) -> TransferReceiver:
        """Its staging takes no memory before the first fetch."""
        return TransferReceiver(self._runtime.transport, self._runtime.new_staging(PIPELINE_DEPTH))


def _fetch_source_key(sequence: Sequence, fetch_source: FetchSource) -> PrefixKey:
    request, conversion = sequence.job.request, BlockConversion(sequence.hasher.block_size, fetch_source.block_size)
    return conversion.peer_key(sequence.hasher, request.tokens, fetch_source.num_tokens, request.salt)
