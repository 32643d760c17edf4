"""What a decode node does with commands that it cannot read."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import Start
from node.config import NodeConfig
from tests.support.cluster.cluster import SMALL, Process
from tests.support.cluster.nodes import status_of
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S


async def test_a_command_of_another_version_ends_the_request_at_once(tiny_checkpoint, tmp_path: Path) -> None:
    config = NodeConfig("d0", str(tiny_checkpoint("granite")), engine=SMALL)
    d0 = Process.start("d0", config, tmp_path)
    try:
        async with grpc.aio.insecure_channel(d0.ready["address"]) as channel:
            stub = rpc.DecodeStub(channel)
            call = stub.Run(timeout=PATIENCE_S)
            # Nobody ever hands over: without the second command the request would wait for its reservation's end.
            await call.write(codecs.encode_one_of(Start(request(random_prompt(40), GREEDY)), pb.DecodeCommand()))
            assert (await call.read()).WhichOneof("event") == "reserved"
            await call.write(pb.DecodeCommand())
            with pytest.raises(grpc.aio.AioRpcError, match="DecodeCommand without a known command") as failed:
                while await call.read():
                    pass
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            first = stub.Run(timeout=PATIENCE_S)
            await first.write(pb.DecodeCommand())
            assert await first.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(PATIENCE_S):
            while (status := await status_of(d0.ready["address"])).blocks.in_use + status.slots.in_use:
                await asyncio.sleep(0.02)
    finally:
        d0.stop()
