"""The error that a caller gets for a call that its node ended, even if a late write made gRPC replace the status."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.decode_call import GrpcDecodeCall, Inbox
from headrace.wire.errors import NodeBusy, NodeLost
from headrace.wire.messages import Start

NODES_WORD = (grpc.StatusCode.RESOURCE_EXHAUSTED, "8 requests wait already")
GRPCS_OWN = (grpc.StatusCode.INTERNAL, "Internal error from Core")


class EndedCall:
    """Behaves like gRPC: done callbacks get the first status only, and a late write sets INTERNAL."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._told: list[Callable[[object], None]] = []
        self.before_write: Callable[[], object] = lambda: None
        self.after_write: Callable[[], object] = lambda: None

    def add_done_callback(self, told: Callable[[object], None]) -> None:
        self._told.append(told)

    def end(self, status: tuple[grpc.StatusCode, str]) -> None:
        self.status = status
        while self._told:
            self._told.pop()(self)

    async def code(self) -> grpc.StatusCode:
        assert self.status is not None
        return self.status[0]

    async def details(self) -> str:
        assert self.status is not None
        return self.status[1]

    async def write(self, message: object) -> None:
        self.before_write()
        self.end(GRPCS_OWN)
        self.after_write()
        raise grpc.aio.AioRpcError(GRPCS_OWN[0], grpc.aio.Metadata(), grpc.aio.Metadata(), GRPCS_OWN[1])

    def cancel(self) -> None:
        """It has ended."""


async def entered(call: EndedCall) -> None:
    start = Start(Request("r", TokenArray.of((1,)), 1, Sampling(1, 0)))
    async with GrpcDecodeCall("d0", call, start, Inbox()):  # type: ignore[arg-type]
        raise AssertionError("the write should have failed")


async def test_the_nodes_word_came_before_the_late_write() -> None:
    call = EndedCall()
    call.before_write = lambda: call.end(NODES_WORD)
    with pytest.raises(NodeBusy, match="8 requests wait already"):
        await entered(call)


async def test_the_nodes_word_comes_after_the_late_write() -> None:
    call, later = EndedCall(), []
    call.after_write = lambda: later.append(asyncio.get_running_loop().call_soon(call.end, NODES_WORD))
    with pytest.raises(NodeBusy, match="8 requests wait already"):
        await entered(call)


async def test_a_node_without_a_word_is_lost() -> None:
    with pytest.raises(NodeLost, match="Internal error from Core"):
        await entered(EndedCall())
