"""How calls to a node end, as a gRPC client sees it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

import node_runtime.service
from decode_node.service import DecodeService
from headrace.engine.failures import NanLogits, NeedsMoreMemory, OutOfMemory, StepFailed, UnprovenPrefix
from headrace.engine.loop import EngineLost
from headrace.tracing import NoTracing
from headrace.wire import codecs
from headrace.wire.call_status import node_error
from headrace.wire.errors import (
    InvalidLogits,
    NodeBusy,
    NodeCrashed,
    NodeError,
    NodeStopped,
    PrefixForgotten,
    RequestRefused,
)
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import PrefillRequest, Start
from headrace.wire.server import ControlServer
from node_runtime.router_calls import RouterCalls
from node_runtime.token_feeds import TokenFeeds
from prefill_node.service import PrefillService
from tests.support.engine.driving import GREEDY, request
from tests.support.node.linked_roles import Linked, linked
from tests.support.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S  # of what is expected to end by itself


@asynccontextmanager
async def served(nodes: Linked) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the services of both roles."""

    def add(server: grpc.aio.Server) -> None:
        calls, tracing = RouterCalls(), NoTracing()
        rpc.add_DecodeServicer_to_server(DecodeService(nodes.decode, calls, TokenFeeds(), tracing), server)
        rpc.add_PrefillServicer_to_server(PrefillService(nodes.prefill, calls, tracing), server)

    server = ControlServer(["Decode", "Prefill"], add)
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(TIMEOUT_S):
            yield channel
    finally:
        await server.stop(0)


async def test_a_caller_without_a_deadline_holds_blocks_and_slot_for_a_while_only(
    tiny_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_runtime.service, "DEFAULT_TIMEOUT_S", 5.0)  # a busy machine may take seconds to reserve
    model: Path = tiny_checkpoint("granite")
    async with linked(model) as nodes, served(nodes) as channel:
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


async def test_a_prompt_that_is_no_prompt_of_the_model_is_refused_and_the_node_goes_on(tiny_checkpoint) -> None:
    refused = {
        b"": "the prompt has no tokens",
        bytes(6): "6 bytes are no token ids: each has 4 bytes",
        b"\x05\0\0\0\0\x02\0\0": "token id 512 is outside the model's vocabulary of 512",
        b"\xff" * 4: "token id 4294967295 is outside the model's vocabulary of 512",
    }
    asked = request([1] * 20, GREEDY)
    async with linked(tiny_checkpoint("granite")) as nodes, served(nodes) as channel:
        start = codecs.encode_one_of(Start(asked, may_prefill_remotely=False), pb.DecodeCommand())
        work = codecs.encode(PrefillRequest(asked), pb.PrefillRequest())
        for packed, cause in refused.items():
            start.start.request.tokens = work.request.tokens = packed
            decoding = rpc.DecodeStub(channel).Run(timeout=TIMEOUT_S)
            await decoding.write(start)
            for call in (decoding, rpc.PrefillStub(channel).Run(work, timeout=TIMEOUT_S)):
                with pytest.raises(grpc.aio.AioRpcError, match=cause) as ended:
                    await call.read()
                assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(await nodes.generate(asked)) == GREEDY.max_tokens
        await nodes.settled()


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


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (NeedsMoreMemory("why"), RequestRefused),
        (OutOfMemory("why"), NodeBusy),
        (NanLogits("why"), InvalidLogits),
        (UnprovenPrefix("why"), PrefixForgotten),
        (StepFailed("why"), NodeCrashed),
        (EngineLost("why"), NodeStopped),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
async def test_a_router_sees_why_an_engine_ended_a_request(raised: Exception, seen: type[NodeError]) -> None:
    class Aborted(Exception):
        pass

    class Context:
        def time_remaining(self) -> float:
            return 1000.0

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise Aborted(code, details)

    with pytest.raises(Aborted) as aborted:
        async with node_runtime.service.errors_as_status(Context()):  # type: ignore[arg-type]
            raise raised
    error = node_error("d0", *aborted.value.args)
    assert type(error) is seen and error.message.endswith("why")
