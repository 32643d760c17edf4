"""A call of a resumable request that is ended on purpose says so: without a word the router is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.request import FinishReason, Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire import codecs
from headrace.wire.client import GrpcNodeClient
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeDone, DecodeReport, LocalPrefill, Start
from headrace.wire.server import ControlServer
from tests.support.patience import PATIENCE_S

DONE = DecodeDone(FinishReason.STOP, DecodeReport("d0", 0, 0, "computed", 0))


class Listening(rpc.DecodeServicer):
    """Notes a call's commands until it ends; sends `answer` first."""

    def __init__(self, *answer: Any) -> None:
        self.commands: list[str | None] = []
        self.ended = asyncio.Event()
        self._answer = answer

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DecodeEvent]:
        self.commands.append((await anext(request_iterator)).WhichOneof("command"))
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            for event in self._answer:
                yield codecs.encode_one_of(event, pb.DecodeEvent())
            if self._answer[-1] is not DONE:
                await asyncio.Event().wait()
        finally:
            reading.cancel()
            self.ended.set()

    async def _read(self, commands: Any) -> None:
        async for command in commands:
            self.commands.append(command.WhichOneof("command"))


@asynccontextmanager
async def served(node: Listening) -> AsyncIterator[GrpcNodeClient]:
    server = ControlServer(["Decode"], lambda it: rpc.add_DecodeServicer_to_server(node, it))
    client = GrpcNodeClient("d0", f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


@pytest.mark.parametrize(
    ("is_resumable", "answer", "commands"),
    [
        (True, [LocalPrefill(0)], ["start", "abandon"]),
        (False, [LocalPrefill(0)], ["start"]),
        (True, [LocalPrefill(0), DONE], ["start"]),
    ],
)
async def test_only_a_call_that_could_be_resumed_is_abandoned_in_words(
    is_resumable: bool, answer: list[Any], commands: list[str]
) -> None:
    node = Listening(*answer)
    start = Start(Request("r", TokenArray.of((1,)), 1, Sampling(1, 0), is_resumable=is_resumable))
    async with asyncio.timeout(PATIENCE_S), served(node) as client:
        async with client.decode(start, timeout_s=PATIENCE_S) as call:
            events = aiter(call)
            assert [await anext(events) for _ in answer] == answer
            assert await call.abandon() == ("abandon" in commands)
        await node.ended.wait()
    assert node.commands == commands
