"""Whoever reaches a decode node's UCX port and knows a session's nonce, and not its secret: real nodes, a real
reservation, and a stranger in this process. The prefill node's transfer decides the answer; the stranger's none of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.request import Request
from headrace.wire.client import DecodeCall
from headrace.wire.errors import TransferBroken
from headrace.wire.messages import (
    DecodeDone,
    DecodeEvent,
    PrefillRequest,
    Renew,
    Reservation,
    SessionFailed,
    Start,
    Tokens,
    TransferReport,
)
from node_runtime.sessions import plan_of
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import CALL_TIMEOUT_S, node_client, status_of
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S
from transfer.buffers import StagingBuffer
from transfer.protocol.authentication import new_secret
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import UcxConfig, open_transport

PROMPT = random_prompt(300, seed=31)
SAMPLING = replace(GREEDY, max_tokens=24)
MESSAGE_BYTES = 1 << 16  # several messages for this prompt
RESERVATION_S = 3.0  # what a session that nobody answers takes to fail


@pytest.fixture(scope="module")
def cluster(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    common = {"max_message_bytes": MESSAGE_BYTES}
    decode = {**common, "reservation_timeout_s": RESERVATION_S}
    folder = tmp_path_factory.mktemp("strangers")
    with Cluster(tiny_checkpoint("qwen35"), folder, prefill=common, decode=decode) as running:
        yield running


@pytest.fixture
def asked() -> Request:
    return request(PROMPT, SAMPLING)


@asynccontextmanager
async def stranger() -> AsyncIterator[Callable[[Reservation], OutgoingTransfer]]:
    """Sends all messages of a reservation, with a secret of its own and bytes of its own."""
    transport = open_transport(UcxConfig())
    sender = TransferSender(transport, Staging(StagingConfig(2, 1 << 20)))

    async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
        buffer.payload[:] = 0xAA

    def send(reservation: Reservation) -> OutgoingTransfer:
        deadline_s = asyncio.get_running_loop().time() + CALL_TIMEOUT_S
        transfer = sender.open(
            plan_of(reservation, MESSAGE_BYTES),
            reservation.transfer_address,
            secret=new_secret(),
            pack=pack,
            deadline_s=deadline_s,
        )
        transfer.tokens_computed(reservation.num_tokens)
        transfer.finish(1)
        return transfer

    try:
        yield send
    finally:
        await transport.close()


@asynccontextmanager
async def reserved(cluster: Cluster, asked: Request) -> AsyncIterator[tuple[DecodeCall, AsyncIterator[DecodeEvent]]]:
    async with (
        node_client("d0", cluster.processes["d0"].ready["address"]) as client,
        client.decode(Start(asked), timeout_s=CALL_TIMEOUT_S) as call,
    ):
        yield call, aiter(call)


async def prefill(cluster: Cluster, asked: Request, reservation: Reservation) -> None:
    async with (
        node_client("p0", cluster.processes["p0"].ready["address"]) as client,
        client.prefill(PrefillRequest(asked, reservation), timeout_s=CALL_TIMEOUT_S) as call,
    ):
        async for _ in call:
            pass


async def rest_of(outcome: DecodeEvent, events: AsyncIterator[DecodeEvent]) -> list[int]:
    """The decode node's tokens after the first, if the transfer has landed."""
    assert isinstance(outcome, TransferReport)
    tokens: list[int] = []
    async for event in events:
        if isinstance(event, DecodeDone):
            break
        assert isinstance(event, Tokens)
        tokens += [token.id for token in event.tokens]
    return tokens


async def refused(cluster: Cluster, cause: str) -> float:
    status = await status_of(cluster.processes["d0"].ready["address"])
    return status.counters[f"cause={cause}/transfer_refused_parts"]


async def settle(cluster: Cluster) -> None:
    for name in ("p0", "d0"):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await status_of(cluster.processes[name].ready["address"])
                if status.blocks.in_use + status.slots.in_use + status.running + status.waiting == 0:
                    break
                await asyncio.sleep(0.02)
        for pool in (status.blocks, status.slots):
            assert pool.free + pool.cached == pool.total


async def test_a_stranger_with_the_nonce_lands_nothing_and_the_session_goes_on(cluster: Cluster, asked: Request):
    unsigned, unannounced = await refused(cluster, "wrong_mac"), await refused(cluster, "no_envelope")
    async with reserved(cluster, asked) as (_, events), stranger() as forge:
        reservation = await anext(events)
        assert isinstance(reservation, Reservation)
        num_messages = len(plan_of(reservation, MESSAGE_BYTES).messages)
        assert num_messages >= 3
        await forge(reservation).done()  # all of it was taken, and thrown away
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while await refused(cluster, "no_envelope") < unannounced + num_messages:
                await asyncio.sleep(0.01)
        await prefill(cluster, asked, reservation)
        answer = await rest_of(await anext(events), events)
    assert answer == greedy(cluster.model, PROMPT, SAMPLING.max_tokens)[1:]
    assert await refused(cluster, "wrong_mac") == unsigned + num_messages
    await settle(cluster)


async def test_a_stranger_during_the_hand_over_changes_no_token(cluster: Cluster):
    asked = request([*PROMPT[1:], 5], SAMPLING)  # nothing of it is cached yet
    async with reserved(cluster, asked) as (call, events), stranger() as forge:
        reservation = await anext(events)
        assert isinstance(reservation, Reservation)
        forged = [forge(reservation) for _ in range(5)]
        with suppress(TransferBroken):
            await prefill(cluster, asked, reservation)
        outcome = await anext(events)
        for transfer in forged:
            transfer.cancel()
            with suppress(TransferFailed):  # or it had been taken before
                await transfer.done()
        if isinstance(outcome, SessionFailed):  # a payload of the stranger's came right behind a signed envelope
            assert outcome.cause.startswith(("wrong_digest", "wrong_size"))
            await call.send(Renew(reservation.nonce))
            renewed = await anext(events)
            assert isinstance(renewed, Reservation)
            await prefill(cluster, asked, renewed)
            outcome = await anext(events)
        answer = await rest_of(outcome, events)
    assert answer == greedy(cluster.model, asked.tokens, SAMPLING.max_tokens)[1:]
    await settle(cluster)


async def test_a_reservation_that_only_a_stranger_answers_can_be_renewed(cluster: Cluster):
    asked = request([*PROMPT[2:], 5, 6], SAMPLING)
    async with reserved(cluster, asked) as (call, events), stranger() as forge:
        first = await anext(events)
        assert isinstance(first, Reservation)
        await forge(first).done()
        await call.send(Renew(first.nonce))  # as a router does whose prefill node is lost: nothing proven has come
        second = await anext(events)
        assert isinstance(second, Reservation)
        assert second.nonce != first.nonce and second.secret != first.secret
        await prefill(cluster, asked, second)
        answer = await rest_of(await anext(events), events)
    assert answer == greedy(cluster.model, asked.tokens, SAMPLING.max_tokens)[1:]
    await settle(cluster)


async def test_a_prefill_node_refuses_a_reservation_of_an_older_release(cluster: Cluster):
    asked = request([*PROMPT[3:], 5, 6, 7], SAMPLING)
    async with reserved(cluster, asked) as (_, events):
        reservation = await anext(events)
        assert isinstance(reservation, Reservation)
        with pytest.raises(TransferBroken, match=r"secret has 0 bytes, not 32.*run one release on all nodes"):
            await prefill(cluster, asked, replace(reservation, secret=b""))
        await prefill(cluster, asked, reservation)  # which the refusal has not touched
        answer = await rest_of(await anext(events), events)
    assert answer == greedy(cluster.model, asked.tokens, SAMPLING.max_tokens)[1:]
    await settle(cluster)


async def test_no_secret_is_in_a_log(cluster: Cluster, asked: Request):
    async with reserved(cluster, asked) as (_, events), stranger() as forge:
        reservation = await anext(events)
        assert isinstance(reservation, Reservation)
        await forge(reservation).done()
        await prefill(cluster, asked, reservation)
        await rest_of(await anext(events), events)
    logs = "".join(process.log.read_text() for process in cluster.processes.values())
    assert "a part of a session of 300 tokens was refused, wrong_mac" in logs
    assert reservation.secret.hex() not in logs and repr(reservation.secret)[2:-1] not in logs
    assert reservation.secret.hex() not in repr(reservation) and repr(reservation.secret) not in repr(reservation)
