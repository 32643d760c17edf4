"""How calls to a node end, as a gRPC client sees it."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

import node_runtime.service
from decode_node.service import DecodeService
from headrace.tracing import NoTracing
from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import Start
from headrace.wire.server import ControlServer
from node_runtime.router_calls import RouterCalls
from node_runtime.token_feeds import TokenFeeds
from tests.support.engine.driving import request
from tests.support.node.linked_roles import linked
from tests.support.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S  # of what is expected to end by itself


async def test_a_caller_without_a_deadline_holds_blocks_and_slot_for_a_while_only(
    tiny_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_runtime.service, "DEFAULT_TIMEOUT_S", 5.0)  # a busy machine may take seconds to reserve
    model: Path = tiny_checkpoint("granite")
    async with linked(model) as nodes:
        service = DecodeService(nodes.decode, RouterCalls(), TokenFeeds(), NoTracing())
        server = ControlServer(["Decode"], lambda server: rpc.add_DecodeServicer_to_server(service, server))
        port = await server.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(TIMEOUT_S):
                call = rpc.DecodeStub(channel).Run()
                await call.write(codecs.encode_one_of(Start(request([1] * 100)), pb.DecodeCommand()))
                reserved = codecs.decode_one_of(await call.read())
                assert reserved.num_tokens == 100
                with pytest.raises(grpc.aio.AioRpcError) as ended:  # nobody hands over, and the caller stays
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "set no deadline and has not ended within 5 s" in str(ended.value.details())
            await nodes.settled()
        finally:
            await server.stop(0)


async def test_a_callers_own_deadline_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_runtime.service, "DEFAULT_TIMEOUT_S", 0.05)

    class Context:
        def time_remaining(self) -> float:
            return 1000.0

    async with node_runtime.service.errors_as_status(Context()):  # type: ignore[arg-type]
        await asyncio.sleep(0.1)


async def test_an_inner_timeout_is_not_taken_for_the_calls() -> None:
    class Context:
        def time_remaining(self) -> None:
            return None

    with pytest.raises(TimeoutError):
        async with node_runtime.service.errors_as_status(Context()):  # type: ignore[arg-type]
            raise TimeoutError
