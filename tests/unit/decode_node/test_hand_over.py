"""A running request moves from one decode node to another, with real engines: nothing is computed again."""

import asyncio
from dataclasses import replace

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.intake import BadRequest
from headrace.request import Request, Sampling
from headrace.wire.messages import (
    DecodeDone,
    GoOn,
    Halt,
    HaltReply,
    HandedOver,
    HandOver,
    LocalPrefill,
    Reservation,
    SessionFailed,
    Stop,
    Tokens,
    TransferReport,
)
from tests.support.engine.driving import SMALL, request
from tests.support.engine.oracle import random_prompt
from tests.support.node.decode_pair import Call, DecodePair, decode_pair
from tests.support.transfer.faulty import Deliver, FaultyTransport, flip_chosen
from transfer.backend import Arrival, Transport
from transfer.protocol.errors import TransferFailed

PROMPT = random_prompt(40, seed=3)
GREEDY = Sampling(max_tokens=60, seed=0, temperature=0.0, ignore_eos=True)
DRAWN = Sampling(
    max_tokens=60, seed=11, temperature=0.9, top_k=20, repetition_penalty=1.2, presence_penalty=0.4, logprobs=3,
    min_tokens=50, ignore_eos=True,
)  # fmt: skip


async def alone(nodes: DecodePair, asked: Request) -> list[int]:
    return await nodes.call(1, asked).end()


async def halted(nodes: DecodePair, asked: Request, after: int = 5) -> Call:
    """A request that runs on the first node and halts after some tokens."""
    call = nodes.call(0, asked)
    while len(call.tokens) < after:
        await call.until(Tokens)
    call.send(Halt())
    assert await call.until(HaltReply) == HaltReply(is_halted=True)
    return call


def so_far(asked: Request, call: Call) -> Request:
    """The request for the other node: what has been computed, all tokens but the newest."""
    return replace(asked, tokens=asked.tokens.followed_by(call.tokens[:-1]))


async def moved(nodes: DecodePair, asked: Request, call: Call) -> Call:
    there = nodes.call(1, so_far(asked, call), is_handed_over=True)
    reservation = await there.until(Reservation)
    call.send(HandOver(reservation))
    assert await call.rest() == [HandedOver()]
    await there.until(TransferReport)
    return there


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn with penalties"])
@pytest.mark.parametrize("family", ["granite", "qwen35"])
async def test_a_running_request_goes_on_elsewhere_and_nothing_is_computed_again(
    tiny_checkpoint, family: str, sampling: Sampling
) -> None:
    async with decode_pair(tiny_checkpoint(family)) as nodes:
        asked = request(PROMPT, sampling)
        call = await halted(nodes, asked)
        there = await moved(nodes, asked, call)
        await there.end()
        computed = nodes.computed_tokens
        assert call.tokens + there.tokens == await alone(nodes, asked)
        assert computed == len(PROMPT) + sampling.max_tokens - 1
        await nodes.settled()


async def test_a_node_with_larger_blocks_takes_over(tiny_checkpoint) -> None:
    other = EngineConfig(**{**vars(SMALL), "block_size": 32})
    async with decode_pair(tiny_checkpoint("granite"), engine=other) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        there = await moved(nodes, asked, call)
        await there.end()
        assert call.tokens + there.tokens == await alone(nodes, asked)
        await nodes.settled()


async def test_a_node_that_holds_the_prompt_receives_only_the_rest_and_never_computes(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        asked = request(PROMPT, GREEDY)
        whole = await alone(nodes, asked)  # the second node keeps blocks and checkpoints of it
        before = nodes.computed_tokens
        call = await halted(nodes, asked)
        there = nodes.call(1, so_far(asked, call), is_handed_over=True)
        first = await there.next()
        assert isinstance(first, Reservation), f"{first}: it resumes from its own checkpoint instead"
        assert first.attention_hit_tokens >= 32
        call.send(HandOver(first))
        assert await call.rest() == [HandedOver()]
        await there.end()
        assert call.tokens + there.tokens == whole
        assert nodes.computed_tokens - before == len(PROMPT) + GREEDY.max_tokens - 1
        await nodes.settled()


async def test_a_request_that_stays_after_all_goes_on(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        call.send(GoOn())
        assert await call.end() == await alone(nodes, asked)
        await nodes.settled()


async def test_a_halted_request_ends_with_a_stop(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        call = await halted(nodes, request(PROMPT, GREEDY))
        call.send(Stop())
        assert isinstance(await call.next(), DecodeDone)
        await call.close()
        await nodes.settled()


async def test_a_call_that_ends_while_a_request_is_halted_gives_everything_back(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        call = await halted(nodes, request(PROMPT, GREEDY))
        await call.close()
        await nodes.settled()


async def test_a_call_that_ends_while_a_request_is_sent_gives_everything_back(tiny_checkpoint) -> None:
    is_sending = asyncio.Event()

    def held(part: Arrival, deliver: Deliver) -> None:
        is_sending.set()

    async with decode_pair(tiny_checkpoint("granite"), distort=lambda inner: FaultyTransport(inner, held)) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        there = nodes.call(1, so_far(asked, call), is_handed_over=True)
        call.send(HandOver(await there.until(Reservation)))
        reading = asyncio.create_task(call.rest())
        await is_sending.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await there.close()
        await nodes.settled()


async def test_a_transfer_that_fails_leaves_the_receiver_to_be_renewed(tiny_checkpoint) -> None:
    def flip(transport: Transport) -> Transport:
        return FaultyTransport(transport, flip_chosen(lambda part: 0 if part.tag.is_payload else None))

    async with decode_pair(tiny_checkpoint("granite"), distort=flip) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        there = nodes.call(1, so_far(asked, call), is_handed_over=True)
        call.send(HandOver(await there.until(Reservation)))
        sending = asyncio.create_task(call.rest())
        assert isinstance(await there.until(SessionFailed), SessionFailed)
        await asyncio.gather(sending, return_exceptions=True)  # it may have sent everything by then
        await there.close()
        await nodes.settled()


async def test_a_reservation_of_another_length_is_refused(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        there = nodes.call(1, asked, is_handed_over=True)
        call.send(HandOver(await there.until(Reservation)))
        with pytest.raises(BadRequest, match=r"halted after \d+ computed tokens, and 40 are reserved"):
            await call.rest()
        await there.close()
        await nodes.settled()


async def test_a_request_that_does_not_run_yet_does_not_halt(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        call = nodes.call(0, request(PROMPT, GREEDY), is_handed_over=True)
        await call.until(Reservation)
        call.send(Halt())
        assert await call.next() == HaltReply(is_halted=False)
        await call.close()
        await nodes.settled()


async def test_a_handed_over_request_says_so_in_no_local_prefill(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        asked = request(PROMPT, GREEDY)
        await alone(nodes, asked)
        call = nodes.call(1, asked)
        assert isinstance(await call.next(), LocalPrefill), "else the test before proves nothing"
        await call.close()
        await nodes.settled()


async def test_a_lost_peer_fails_the_senders_call(tiny_checkpoint) -> None:
    async with decode_pair(tiny_checkpoint("granite")) as nodes:
        asked = request(PROMPT, GREEDY)
        call = await halted(nodes, asked)
        there = nodes.call(1, so_far(asked, call), is_handed_over=True)
        reservation = await there.until(Reservation)
        call.send(HandOver(replace(reservation, transfer_address="nowhere")))
        with pytest.raises(TransferFailed):
            await call.rest()
        await there.close()
        await nodes.settled()
