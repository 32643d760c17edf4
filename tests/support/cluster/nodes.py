"""Talks to single nodes over gRPC, as a router would."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from headrace.request import Request
from headrace.wire import codecs
from headrace.wire.cache_updates import CacheSnapshotPart
from headrace.wire.client import GrpcNodeClient
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import (
    DecodeDone,
    FetchSource,
    FirstToken,
    PrefillDone,
    PrefillReport,
    PrefillRequest,
    Reservation,
    Start,
    Tokens,
)
from headrace.wire.node_messages import NodeStatus
from headrace.wire.tls import Identity
from tests.support.cluster.cluster import Cluster
from tests.support.patience import PATIENCE_S

CALL_TIMEOUT_S = PATIENCE_S


@asynccontextmanager
async def node_client(name: str, address: str, identity: Identity | None = None) -> AsyncIterator[GrpcNodeClient]:
    client = GrpcNodeClient(name, address, identity)
    try:
        yield client
    finally:
        await client.close()


def total(counters: Mapping[str, float], name: str) -> float:
    """Of one counter, over all its labels."""
    return sum(value for counter, value in counters.items() if counter.rpartition("/")[2] == name)


async def decode_alone(client: GrpcNodeClient, request: Request, fetch_source: FetchSource | None = None) -> list[int]:
    """The decode node's answer; it computes the prompt itself."""
    tokens: list[int] = []
    async with client.decode(
        Start(request, may_prefill_remotely=False, fetch_source=fetch_source), timeout_s=CALL_TIMEOUT_S
    ) as call:
        async for event in call:
            if isinstance(event, Tokens):
                tokens += [token.id for token in event.tokens]
            if isinstance(event, DecodeDone):
                break
    return tokens


async def first_token(
    client: GrpcNodeClient, request: Request, fetch_source: FetchSource | None
) -> tuple[int, PrefillReport]:
    """The prefill node's; it hands over to nobody."""
    work = PrefillRequest(request, fetch_source=fetch_source)
    async with client.prefill(work, timeout_s=CALL_TIMEOUT_S) as call:
        _, first, done = [event async for event in call]
    assert isinstance(first, FirstToken) and isinstance(done, PrefillDone)
    return first.token.id, done.report


async def status_of(address: str) -> NodeStatus:
    """As it is now, not as it was at the last heartbeat."""
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await rpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S)
    return codecs.decode(reply.status, NodeStatus)


async def until_the_router_knows(cluster: Cluster, identity: Identity | None = None) -> None:
    """All that the nodes themselves say that they hold: what the next turn's hint is made of."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        for node in cluster.nodes().values():
            async with node_client(node["name"], node["address"], identity) as client, client.cache_updates() as call:
                truth = await anext(aiter(call))
            assert isinstance(truth, CacheSnapshotPart)
            while (cluster.nodes()[node["name"]]["index"]["sequence"] or 0) < truth.sequence:
                await asyncio.sleep(0.02)


async def handed_over(
    prefill: GrpcNodeClient, decode: GrpcNodeClient, request: Request, fetch_source: FetchSource | None = None
) -> tuple[list[int], PrefillReport]:
    """One node computes the prompt and hands it over to the other, as a router has them do it."""
    tokens: list[int] = []
    async with AsyncExitStack() as calls:
        call = await calls.enter_async_context(decode.decode(Start(request), timeout_s=CALL_TIMEOUT_S))
        async for event in call:
            if isinstance(event, Reservation):
                work = PrefillRequest(request, event, fetch_source=fetch_source)
                prefilling = await calls.enter_async_context(prefill.prefill(work, timeout_s=CALL_TIMEOUT_S))
                _, first, done = [each async for each in prefilling]
                assert isinstance(first, FirstToken) and isinstance(done, PrefillDone)
                tokens.append(first.token.id)
            if isinstance(event, Tokens):
                tokens += [token.id for token in event.tokens]
            if isinstance(event, DecodeDone):
                break
    return tokens, done.report
