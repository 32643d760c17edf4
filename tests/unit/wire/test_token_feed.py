"""Tokens of several calls in one feed, over gRPC: their order, its limits, and what becomes of calls when it ends."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from decode_node.service import DecodeService
from headrace.request import FinishReason, Logprobs, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.tracing import NoTracing
from headrace.wire.client import GrpcNodeClient
from headrace.wire.decode_call import CONFIRM_EVERY
from headrace.wire.errors import NodeLost
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeDone, DecodeEvent, DecodeReport, LocalPrefill, Start, Tokens
from headrace.wire.server import ControlServer
from node_runtime.router_calls import RouterCalls
from node_runtime.token_feeds import MAX_UNREAD, FedCall, TokenFeeds
from tests.support.patience import PATIENCE_S

DONE = DecodeDone(FinishReason.LENGTH, DecodeReport("d0", 0, 0, "computed", 0))
Script = Callable[[], AsyncIterator[DecodeEvent]]


class Scripted:
    """A decode role that answers each call with a script, by the request's id."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self._scripts = scripts
        self.fed: dict[str, FedCall] = {}

    async def run(
        self, start: Start, commands: Any, timeout_s: float, fed: FedCall
    ) -> AsyncGenerator[DecodeEvent, None]:
        self.fed[start.request.request_id] = fed
        reading = asyncio.create_task(self._read(commands))
        try:
            async for event in self._scripts[start.request.request_id]():
                yield event
        finally:
            reading.cancel()

    async def _read(self, commands: Any) -> None:
        async for command in commands:
            raise AssertionError(f"{command} is none of the role's business")


class CountingService(DecodeService):
    """Counts what goes by the calls' own streams and by feeds."""

    num_own = num_fed = num_messages = 0

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.DecodeEvent]:
        async for event in super().Run(request_iterator, context):
            self.num_own += len(event.tokens.tokens)
            yield event

    async def Feed(self, request: Any, context: Any) -> AsyncIterator[pb.FedTokens]:
        async for message in super().Feed(request, context):
            self.num_fed += len(message.token_ids)
            self.num_messages += 1
            yield message


@dataclass
class Pair:
    client: GrpcNodeClient
    service: CountingService
    feeds: TokenFeeds
    server: ControlServer
    role: Scripted

    async def fed(self) -> None:
        """Returns once the router's feed is open."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.feeds._open:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def pair(scripts: dict[str, Script]) -> AsyncIterator[Pair]:
    feeds, role = TokenFeeds(), Scripted(scripts)
    service = CountingService(role, RouterCalls(), feeds, NoTracing())  # type: ignore[arg-type]
    server = ControlServer(["Decode"], lambda it: rpc.add_DecodeServicer_to_server(service, it))
    client = GrpcNodeClient("d0", f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    try:
        yield Pair(client, service, feeds, server, role)
    finally:
        await client.close()
        await server.stop(0)


def start(request_id: str) -> Start:
    return Start(Request(request_id, TokenArray.of((1,)), 1, Sampling(1000, 0)))


def tokens(*ids: int) -> Tokens:
    return Tokens(tuple(map(Token, ids)))


async def read(pair: Pair, request_id: str) -> list[DecodeEvent]:
    async with asyncio.timeout(PATIENCE_S), pair.client.decode(start(request_id), timeout_s=PATIENCE_S) as call:
        return [event async for event in call]


def ids_of(events: list[DecodeEvent]) -> list[int]:
    return [token.id for event in events if isinstance(event, Tokens) for token in event.tokens]


async def test_tokens_of_many_calls_share_messages_and_each_call_gets_its_own_in_order() -> None:
    turn, pairs = asyncio.Event(), []

    def script(first: int) -> Script:
        async def answer() -> AsyncIterator[DecodeEvent]:
            yield LocalPrefill(first)
            await pairs[0].fed()
            for step in range(40):
                await turn.wait()  # all answers have a token in the same turn of the loop
                yield tokens(first + step)
            yield Tokens((Token(first + 40),), FinishReason.LENGTH)
            yield DONE

        return answer

    async def steps() -> None:
        while True:
            turn.set()
            turn.clear()
            await asyncio.sleep(0.001)

    numbers = range(20)
    async with pair({str(n): script(1000 * n) for n in numbers}) as both:
        pairs.append(both)
        stepping = asyncio.create_task(steps())
        answers = await asyncio.gather(*(read(both, str(n)) for n in numbers))
        stepping.cancel()
        for n, events in zip(numbers, answers, strict=True):
            assert events[0] == LocalPrefill(1000 * n)
            assert ids_of(events) == list(range(1000 * n, 1000 * n + 41))
            assert events[-1] == DONE
        assert both.service.num_own == len(numbers)  # each answer's last token
        assert both.service.num_messages < both.service.num_fed / 5


async def test_tokens_before_the_feed_is_open_and_those_with_logprobs_go_by_the_calls_own_stream() -> None:
    pairs = []

    async def answer() -> AsyncIterator[DecodeEvent]:
        yield tokens(1, 2)
        await pairs[0].fed()
        yield tokens(3)
        yield Tokens((Token(4, Logprobs(-1.0, ())),))
        yield tokens(5)
        yield DONE

    async with pair({"a": answer}) as both:
        pairs.append(both)
        events = await read(both, "a")
        assert ids_of(events) == [1, 2, 3, 4, 5]
        assert both.service.num_fed in (2, 4)  # the feed may have been open from the beginning


async def test_a_router_that_reads_nothing_is_fed_no_more_than_so_many_tokens() -> None:
    most, go_on, pairs = 4 * MAX_UNREAD, asyncio.Event(), []

    async def answer() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        for number in range(most):
            yield tokens(number)
        go_on.set()
        yield DONE

    async with pair({"a": answer}) as both:
        pairs.append(both)
        async with asyncio.timeout(PATIENCE_S), both.client.decode(start("a"), timeout_s=PATIENCE_S) as call:
            await go_on.wait()
            assert both.service.num_fed <= MAX_UNREAD
            assert ids_of([event async for event in call]) == list(range(most))


async def test_a_router_that_reads_is_fed_all_tokens() -> None:
    most, pairs = 4 * MAX_UNREAD, []

    async def answer() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        for number in range(most):
            yield tokens(number)
            while pairs[0].role.fed["a"]._unread >= 2 * CONFIRM_EVERY:
                await asyncio.sleep(0.001)
        yield DONE

    async with pair({"a": answer}) as both:
        pairs.append(both)
        assert ids_of(await read(both, "a")) == list(range(most))
        assert both.service.num_fed == most


async def test_tokens_taken_at_once_keep_their_place_among_the_events_and_count_as_read() -> None:
    """The node sends a plain token after the other until enough were taken, whatever the reader got meanwhile."""
    pairs, seen, num_taken, num_sent = [], [], 0, 0

    def take(event: Tokens) -> None:
        nonlocal num_taken
        num_taken += len(event.tokens)
        seen.extend(ids_of([event]))

    async def answer() -> AsyncIterator[DecodeEvent]:
        nonlocal num_sent
        yield LocalPrefill(0)
        await pairs[0].fed()
        for most in (1, 10, 2 * MAX_UNREAD):
            while num_taken < most:
                yield tokens(num_sent)
                num_sent += 1
                await asyncio.sleep(0)
            yield Tokens((Token(num_sent, Logprobs(-1.0, ())),))  # by the call's own stream
            num_sent += 1
        yield DONE

    async with pair({"a": answer}) as both:
        pairs.append(both)
        async with asyncio.timeout(PATIENCE_S), both.client.decode(start("a"), timeout_s=PATIENCE_S) as call:
            call.take_with(take, lambda: True)
            async for event in call:
                seen.extend(ids_of([event]))
        assert seen == list(range(num_sent))


async def test_the_reader_gets_what_may_not_be_taken() -> None:
    pairs = []

    async def answer() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        for number in range(20):
            yield tokens(number)
            await asyncio.sleep(0.001)
        yield DONE

    def take(event: Tokens) -> None:
        raise AssertionError(f"{event} may not be taken")

    async with pair({"a": answer}) as both:
        pairs.append(both)
        async with asyncio.timeout(PATIENCE_S), both.client.decode(start("a"), timeout_s=PATIENCE_S) as call:
            call.take_with(take, lambda: False)
            assert ids_of([event async for event in call]) == list(range(20))


@pytest.mark.parametrize("where", ["take", "may_take"])
async def test_an_error_with_one_calls_tokens_is_its_readers_and_the_others_get_theirs(where: str) -> None:
    pairs, has_failed, taken = [], asyncio.Event(), []

    async def answer() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        while not has_failed.is_set():
            yield tokens(0)
            await asyncio.sleep(0.001)  # a reader that tokens flood gets them itself and never waits for one
        for number in range(1, 40):
            yield tokens(number)
            await asyncio.sleep(0)
        yield DONE

    def broken(*_: object) -> bool:
        raise ValueError("no text has such a token")

    async def read_broken(client: GrpcNodeClient) -> None:
        async with client.decode(start("broken"), timeout_s=PATIENCE_S) as call:
            call.take_with(*((broken, lambda: True) if where == "take" else (taken.append, broken)))
            with pytest.raises(ValueError, match="no text"):
                async for _ in call:
                    pass
        has_failed.set()

    async with pair({"broken": answer, "whole": answer}) as both, asyncio.timeout(PATIENCE_S):
        pairs.append(both)
        breaking = asyncio.create_task(read_broken(both.client))
        async with both.client.decode(start("whole"), timeout_s=PATIENCE_S) as call:
            call.take_with(taken.append, lambda: True)
            async for event in call:
                taken.append(event)  # type: ignore[arg-type]
        await breaking
        assert [token_id for token_id in ids_of(taken) if token_id] == list(range(1, 40))


async def test_calls_whose_feed_breaks_are_lost_and_later_ones_get_another_feed() -> None:
    pairs = []

    async def endless() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        for number in range(1_000_000):
            yield tokens(number)
            await asyncio.sleep(0.001)

    async def short() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        yield tokens(7)
        yield DONE

    async with pair({"endless": endless, "short": short}) as both:
        pairs.append(both)
        async with asyncio.timeout(PATIENCE_S), both.client.decode(start("endless"), timeout_s=PATIENCE_S) as call:
            with pytest.raises(NodeLost, match="its feed of tokens broke off"):
                seen = []
                async for event in call:
                    seen.append(event)
                    if len(seen) == 5:
                        break_feeds(both)
        assert ids_of(seen) == list(range(len(ids_of(seen))))
        assert ids_of(await read(both, "short")) == [7]


def break_feeds(pair: Pair) -> None:
    """Ends every feed's call with an error, as a bug of the node would."""
    for feed in pair.feeds._open.values():
        feed._waiting[(0,)] = [0]  # type: ignore[index]
        feed._news.set()


async def test_a_node_that_begins_to_stop_sends_the_rest_by_the_calls_own_streams() -> None:
    pairs = []

    async def answer() -> AsyncIterator[DecodeEvent]:
        await pairs[0].fed()
        yield tokens(1, 2)
        pairs[0].feeds.close()
        yield tokens(3)
        yield DONE

    async with pair({"a": answer}) as both:
        pairs.append(both)
        assert ids_of(await read(both, "a")) == [1, 2, 3]
        assert (both.service.num_fed, both.service.num_own) == (2, 1)
