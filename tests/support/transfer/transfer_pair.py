"""Both ends of a transfer over the in-process transport, in one process."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.loop_clock import soon, turns
from tests.support.transfer.faulty import Fault, FaultyTransport
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from tests.support.transfer.transfer_plans import contents, secret_of
from transfer.buffers import Buffer, StagingBuffer
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig


@dataclass
class Pair:
    """A prefill and a decode node's ends, and what landed."""

    fault: Fault = field(default=lambda part, deliver: deliver(part))
    num_buffers: int = 2
    sender_buffers: int = 2

    def __post_init__(self) -> None:
        self.network = InProcessNetwork()
        self.prefill = InProcessTransport(self.network, "p0")
        self.decode = InProcessTransport(self.network, "d0")
        self.sender_staging = Staging(StagingConfig(self.sender_buffers, buffer_bytes=1000))
        self.receiver_staging = Staging(StagingConfig(self.num_buffers, buffer_bytes=1000))
        self.sender = TransferSender(self.prefill, self.sender_staging)
        self.receiver = TransferReceiver(FaultyTransport(self.decode, self.fault), self.receiver_staging)
        self.landed: list[tuple[PlannedMessage, Buffer]] = []

    def expect(
        self, plan: TransferPlan, deadline_s: float | None = None, timeout_s: float = math.inf
    ) -> IncomingTransfer:
        return self.receiver.expect(
            plan,
            secret=secret_of(plan.nonce),
            land=self.land,
            deadline_s=deadline_s or soon(),
            timeout_s=timeout_s,
        )

    def open(
        self,
        plan: TransferPlan,
        deadline_s: float | None = None,
        timeout_s: float = math.inf,
        *,
        secret: bytes | None = None,
    ) -> OutgoingTransfer:
        """`secret` is the session's, if not said otherwise."""

        async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
            buffer.payload[:] = contents(message, plan.nonce)

        return self.sender.open(
            plan,
            "d0",
            secret=secret or secret_of(plan.nonce),
            pack=pack,
            deadline_s=deadline_s or soon(),
            timeout_s=timeout_s,
        )

    async def land(self, message: PlannedMessage, buffer: StagingBuffer) -> None:
        self.landed.append((message, buffer.payload.copy()))

    def send_all(
        self,
        plan: TransferPlan,
        first_token: int | None = None,
        deadline_s: float | None = None,
        *,
        secret: bytes | None = None,
    ) -> OutgoingTransfer:
        outgoing = self.open(plan, deadline_s, secret=secret)
        outgoing.tokens_computed(plan.num_tokens)
        outgoing.finish(first_token)
        return outgoing

    async def assert_staging_returns(self) -> None:
        await turns()
        for staging, whole in (
            (self.sender_staging, self.sender_buffers),
            (self.receiver_staging, self.num_buffers),
        ):
            staging.check()
            assert staging.num_free == whole

    def assert_landed_whole(self, plan: TransferPlan) -> None:
        assert [message for message, _ in self.landed] == list(plan.messages)
        for message, data in self.landed:
            np.testing.assert_array_equal(data, contents(message, plan.nonce))


async def failure(transfer: IncomingTransfer | OutgoingTransfer) -> TransferFailed:
    with pytest.raises(TransferFailed) as failed:
        await (transfer.landed() if isinstance(transfer, IncomingTransfer) else transfer.done())
    return failed.value
