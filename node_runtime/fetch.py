"""Fetches from another node what it holds of a prompt: blocks beyond this node's attention hit, and a state.

A transfer in the other direction: this node reserves (the sequence holds blocks for the whole prompt and a slot), and
the other node sends. What has landed is verified, and published in this node's cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from headrace.cache.conversion import BlockConversion
from headrace.cache.types import PrefixKey
from headrace.engine.sequence import Admitted, Sequence
from headrace.request import Request
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
from headrace.wire.messages import FetchRequest, FetchSource
from node_runtime.config import FetchConfig
from node_runtime.fetch_channels import FetchChannels
from node_runtime.fetch_costs import MeasuredFetches
from node_runtime.fetch_policy import FetchPolicy
from node_runtime.lifecycle import CallBroken, FetchGivenUp, FetchLanded
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import reserve
from transfer.protocol.envelope import new_nonce
from transfer.protocol.errors import LayoutMismatch, TransferFailed
from transfer.protocol.events import Cause
from transfer.protocol.stats import TransferStats
from transfer.receiver import IncomingTransfer, TransferReceiver

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
    """Nothing was fetched: the prompt is computed. `cause` is one of `_CAUSES`, or the session's `Cause`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class Fetches:
    """All fetches of one node: its channels to other nodes, the measured costs, and the counters.

    connect            opens a channel to a fetch source
    link_bytes_per_s   speed of the link to a node; None: not known
    """

    def __init__(
        self,
        runtime: NodeRuntime,
        config: FetchConfig,
        connect: Callable[[FetchSource], FetchClient],
        link_bytes_per_s: Callable[[str], float | None],
    ) -> None:
        self.costs = MeasuredFetches()
        self._runtime = runtime
        self._receiver = TransferReceiver(runtime.transport, runtime.incoming)
        self._config = config
        self._link_bytes_per_s = link_bytes_per_s
        self._clock = asyncio.get_running_loop().time
        self._channels = FetchChannels(connect, self._clock, runtime.spawn, config.timeout_s)
        self._num_declined = 0
        self._num_landed = 0
        self._num_bytes = 0
        self._failures = dict.fromkeys((*_CAUSES.values(), *map(str, Cause)), 0)

    def counters(self) -> dict[str, float]:
        return {
            "fetches": float(self._num_landed),
            "fetches_declined": float(self._num_declined),
            "fetched_bytes": float(self._num_bytes),
            **{f"cause={cause}/fetch_failures": float(count) for cause, count in self._failures.items()},
        }

    def policy(self, request: Request, fetch_source: FetchSource | None) -> FetchPolicy:
        """Returns the policy of one request, with the costs measured so far."""
        if fetch_source is not None and (link_bytes_per_s := self._link_bytes_per_s(fetch_source.node)) is not None:
            self.costs.link_measured(link_bytes_per_s)
        return FetchPolicy(
            config=self._config,
            costs=self.costs.now,
            step_costs=self._runtime.engine.cost_fit.costs,
            chunk_tokens=self._runtime.config.engine.max_step_tokens,
            layout=self._runtime.wire_layout,
            num_tokens=len(request.tokens),
            fetch_source_tokens=None if fetch_source is None else fetch_source.num_tokens,
            is_scored=request.sampling.prompt_logprobs is not None,
            num_prompts=lambda: self._runtime.engine.num_prompts,
        )

    def declined(self) -> None:
        """Records that a fetch was possible, and computing was estimated to take less time."""
        self._num_declined += 1
        self.costs.declined()

    async def outcome(
        self, sequence: Sequence, fetch_source: FetchSource, admitted: Admitted, deadline_s: float
    ) -> FetchLanded | FetchGivenUp | CallBroken:
        """As `run`: returns how it ended, as an event of the request's lifecycle."""
        try:
            await self.run(sequence, fetch_source, admitted, deadline_s)
        except FetchFailed:
            return FetchGivenUp()
        except Exception as error:
            return CallBroken(error)
        return FetchLanded(fetch_source.num_tokens)

    async def run(self, sequence: Sequence, fetch_source: FetchSource, admitted: Admitted, deadline_s: float) -> None:
        """Fetches into the blocks and the slot of `sequence`, which was admitted to wait for them.

        Returns when everything has landed, verified. Raises FetchFailed, by the deadline at the latest. Nothing lands
        any more when this returns, raises or has been cancelled.

        deadline_s   the request's, on the event loop's clock; `timeout_s` of the config may end the fetch sooner
        """
        deadline_s = min(deadline_s, self._clock() + self._config.timeout_s)
        try:
            reservation, incoming = reserve(
                self._runtime,
                self._receiver,
                sequence,
                admitted,
                nonce=new_nonce(),
                num_tokens=fetch_source.num_tokens,
                deadline_s=deadline_s,
                timeout_s=deadline_s - self._clock(),
            )
        except LayoutMismatch as error:
            failure = FetchFailed("refused", str(error))
            self._count(failure)
            raise failure from error
        request = FetchRequest(_fetch_source_key(sequence, fetch_source), reservation)
        began_s = self._clock()
        try:
            stats = await self._landed(incoming, request, self._channels.client(fetch_source), deadline_s)
        except FetchFailed as failure:
            if failure.cause == "fetch_source_lost":
                self._channels.disconnect(fetch_source.address)
            self.costs.failed(self._clock() - began_s)
            self._count(failure)
            raise
        num_bytes = stats.attention_bytes + stats.state_bytes
        self.costs.fetched(num_bytes, stats.seconds, self._clock() - began_s)
        self._num_landed += 1
        self._num_bytes += num_bytes

    async def _landed(
        self, incoming: IncomingTransfer, request: FetchRequest, client: FetchClient, deadline_s: float
    ) -> TransferStats:
        try:
            reply = await client.fetch(request, timeout_s=max(deadline_s - self._clock(), 0.001))
            self._runtime.require_layout(reply.layout)
            return (await incoming.landed()).stats
        except NodeError as error:
            raise FetchFailed(_CAUSES[type(error)], str(error)) from error
        except LayoutMismatch as error:
            raise FetchFailed("refused", str(error)) from error
        except TransferFailed as error:
            raise FetchFailed(error.cause, str(error)) from error
        finally:
            incoming.cancel()
            with suppress(TransferFailed):
                await incoming.landed()

    def _count(self, failure: FetchFailed) -> None:
        self._failures[failure.cause] += 1
        log.info("computes what could not be fetched: %s", failure)

    async def close(self) -> None:
        await self._channels.close()


def _fetch_source_key(sequence: Sequence, fetch_source: FetchSource) -> PrefixKey:
    """Returns the key by which the source knows the prefix, whatever its block size."""
    request, conversion = sequence.job.request, BlockConversion(sequence.hasher.block_size, fetch_source.block_size)
    return conversion.peer_key(sequence.hasher, request.tokens, fetch_source.num_tokens, request.salt)
