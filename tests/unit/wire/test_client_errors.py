"""gRPC errors of a call to a node become NodeErrors."""

import grpc
import grpc.aio
import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.client import GrpcNodeClient
from headrace.wire.connection_options import MAX_MESSAGE_BYTES
from headrace.wire.errors import (
    CRASH_DETAILS,
    STOP_DETAILS,
    DeadlineExceeded,
    InvalidLogits,
    NodeBusy,
    NodeCrashed,
    NodeError,
    NodeLost,
    NodeStopped,
    PrefixForgotten,
    RequestRefused,
    TransferBroken,
)
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import PrefillRequest, Start, Stop
from headrace.wire.server import ControlServer
from tests.support.patience import PATIENCE_S


class FailingNode(rpc.PrefillServicer, rpc.DecodeServicer):
    """Ends every call with one status, before it has read anything."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code = code
        self._details = details

    async def Run(self, request, context):  # type: ignore[no-untyped-def]
        await context.abort(self._code, self._details)
        yield


class VerboseNode(rpc.PrefillServicer):
    """Answers a prefill with a message that is larger than both sides accept."""

    async def Run(self, request, context):  # type: ignore[no-untyped-def]
        report = pb.PrefillReport(node="x" * (MAX_MESSAGE_BYTES + 1))
        yield pb.PrefillEvent(done=pb.PrefillDone(report=report))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NodeBusy),
        (grpc.StatusCode.ABORTED, TransferBroken),
        (grpc.StatusCode.INVALID_ARGUMENT, RequestRefused),
        (grpc.StatusCode.FAILED_PRECONDITION, RequestRefused),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidLogits),
        (grpc.StatusCode.DATA_LOSS, PrefixForgotten),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, NodeLost),
        (grpc.StatusCode.UNKNOWN, NodeLost),
    ],
)
async def test_status_codes_become_node_errors(code: grpc.StatusCode, error: type[NodeError]):
    await raises_on_every_call(FailingNode(code, "the cause"), error, "n0: the cause")


async def test_a_status_that_names_a_crashed_engine_is_a_crash():
    details = CRASH_DETAILS + "out of memory"
    await raises_on_every_call(FailingNode(grpc.StatusCode.INTERNAL, details), NodeCrashed, "out of memory")


async def test_a_status_that_names_an_engine_that_ended_is_no_crash():
    details = STOP_DETAILS + "another request's step failed"
    await raises_on_every_call(FailingNode(grpc.StatusCode.UNAVAILABLE, details), NodeStopped, "another request")


async def raises_on_every_call(service: FailingNode, error: type[NodeError], details: str) -> None:
    """Asserts that prefill, decode and a later write to the decode call raise exactly this error."""

    def add(server: grpc.aio.Server) -> None:
        rpc.add_PrefillServicer_to_server(service, server)
        rpc.add_DecodeServicer_to_server(service, server)

    server = ControlServer(["Prefill", "Decode"], add)
    port = await server.start("127.0.0.1", 0)
    client = GrpcNodeClient("n0", f"127.0.0.1:{port}")
    request = Request("r", TokenArray.of((1,)), 1, Sampling(max_tokens=1, seed=0))
    try:
        with pytest.raises(error, match=details):
            async with client.prefill(PrefillRequest(request), timeout_s=PATIENCE_S) as prefill:
                async for _ in prefill:
                    pass
        call = client.decode(Start(request), timeout_s=PATIENCE_S)
        with pytest.raises(error, match=details):  # on entering it already, if the node was quicker
            async with call as decode:
                async for _ in decode:
                    pass
        with pytest.raises(error, match=details):
            await call.send(Stop())
    finally:
        await client.close()
        await server.stop(0)


async def test_an_unreachable_node_is_lost():
    client = GrpcNodeClient("n0", "127.0.0.1:1")
    request = Request("r", TokenArray.of((1,)), 1, Sampling(max_tokens=1, seed=0))
    with pytest.raises(NodeLost):
        async with client.decode(Start(request), timeout_s=PATIENCE_S) as call:
            async for _ in call:
                pass
    await client.close()


async def test_a_message_that_is_too_large_is_refused_and_not_tried_elsewhere():
    server = ControlServer(["Prefill"], lambda server: rpc.add_PrefillServicer_to_server(VerboseNode(), server))
    port = await server.start("127.0.0.1", 0)
    client = GrpcNodeClient("p0", f"127.0.0.1:{port}")
    try:
        with pytest.raises(RequestRefused, match=r"p0: .*larger than max"):
            async with client.prefill(
                PrefillRequest(Request("r", TokenArray.of((1,)), 1, Sampling(max_tokens=1, seed=0))),
                timeout_s=PATIENCE_S,
            ) as prefill:
                async for _ in prefill:
                    pass
    finally:
        await client.close()
        await server.stop(0)
