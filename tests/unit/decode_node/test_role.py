"""A decode node's request with a real engine: what is left of it when its call ends in the middle."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from itertools import chain

import pytest

from headrace.request import Request, Sampling, Token
from headrace.wire.messages import Abandon, DecodeCommand, DecodeEvent, LocalPrefill, Start, Tokens
from node_runtime.token_feeds import MAX_UNREAD, UNFED, FedCall, TokenFeed, TokenFeeds
from tests.support.engine.driving import request
from tests.support.engine.oracle import random_prompt
from tests.support.node.linked_roles import Linked, linked
from tests.support.patience import PATIENCE_S

NUM_TOKENS = 200
ASKED = request(
    random_prompt(40, seed=3),
    Sampling(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True),
    salt=b"mine",
    is_resumable=True,
)


async def no_commands() -> AsyncIterator[DecodeCommand]:
    await asyncio.Event().wait()
    yield Abandon()


async def abandon() -> AsyncIterator[DecodeCommand]:
    yield Abandon()


def opened(
    nodes: Linked,
    asked: Request = ASKED,
    commands: AsyncIterator[DecodeCommand] | None = None,
    timeout_s: float = PATIENCE_S,
    fed: FedCall = UNFED,
) -> AsyncGenerator[DecodeEvent, None]:
    return nodes.decode.run(Start(asked, may_prefill_remotely=False), commands or no_commands(), timeout_s, fed)


async def tokens_of(call: AsyncGenerator[DecodeEvent, None], at_least: int | None = None) -> list[int]:
    """The tokens of a call until it ends, or until there are so many."""
    tokens: list[int] = []
    async for event in call:
        if isinstance(event, Tokens):
            tokens += [token.id for token in event.tokens]
        if at_least is not None and len(tokens) >= at_least:
            break
    return tokens


async def lost(nodes: Linked, asked: Request = ASKED) -> None:
    """A call whose router is lost in the middle of the answer."""
    call = opened(nodes, asked)
    await tokens_of(call, 5)
    await call.aclose()


async def test_a_lost_routers_request_goes_on_for_the_next_one(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await tokens_of(opened(nodes))
        await nodes.settled()
        for _ in range(2):
            await lost(nodes)
            assert nodes.decode.orphans() == ("r",)
        call = opened(nodes)
        assert await anext(call) == LocalPrefill(len(ASKED.tokens)), "none of the prompt is computed"
        assert await tokens_of(call) == whole
        assert nodes.decode.orphans() == ()
        assert (nodes.decode.counters()["orphans_kept"], nodes.decode.counters()["orphans_adopted"]) == (2, 2)
        await nodes.settled()


async def test_an_answer_goes_on_with_all_its_log_probabilities(tiny_checkpoint) -> None:
    asked = replace(ASKED, sampling=replace(ASKED.sampling, logprobs=2))

    async def answer(call: AsyncGenerator[DecodeEvent, None]) -> list[Token]:
        return [token async for event in call if isinstance(event, Tokens) for token in event.tokens]

    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await answer(opened(nodes, asked))
        assert len(whole) == NUM_TOKENS and all(token.logprobs for token in whole)
        await lost(nodes, asked)
        assert nodes.decode.orphans() == ("r",)
        resumed = await answer(opened(nodes, asked))
        assert [token.id for token in resumed] == [token.id for token in whole]
        for one, other in zip(resumed, whole, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
        await nodes.settled()


async def test_an_answer_goes_on_after_a_router_that_was_lost_before_it_got_the_tokens_so_far(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite"), decode={"max_unsent_tokens": 4}) as nodes:
        whole = await tokens_of(opened(nodes))
        await lost(nodes)
        call = opened(nodes)
        assert isinstance(await anext(call), LocalPrefill)
        await call.aclose()
        async with asyncio.timeout(PATIENCE_S):
            assert await tokens_of(opened(nodes)) == whole
        await nodes.settled()


async def test_a_router_that_has_shown_some_tokens_gets_the_others(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await tokens_of(opened(nodes))
        await lost(nodes)
        shown = replace(ASKED, tokens=ASKED.tokens.followed_by(whole[:3]))
        assert await tokens_of(opened(nodes, shown)) == whole[3:]


async def test_another_tenants_request_with_the_same_id_is_answered_by_itself(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite")) as nodes:
        await lost(nodes)
        call = opened(nodes, replace(ASKED, salt=b"theirs"))
        assert await anext(call) == LocalPrefill(0)
        assert len(await tokens_of(call)) == NUM_TOKENS
        assert nodes.decode.orphans() == ("r",)


@pytest.mark.parametrize("why", ["abandoned", "not resumable", "deadline"])
async def test_a_request_that_nobody_will_continue_is_released_at_once(
    why: str, tiny_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "deadline":
        monkeypatch.setattr("decode_node.driver.DEADLINE_MARGIN_S", PATIENCE_S)  # too little is left from the start
    async with linked(tiny_checkpoint("granite")) as nodes:
        asked = replace(ASKED, is_resumable=why != "not resumable")
        call = opened(nodes, asked, abandon() if why == "abandoned" else None)
        await tokens_of(call, 5)
        await call.aclose()
        assert nodes.decode.orphans() == ()
        await nodes.settled()


async def test_an_orphan_that_its_router_abandons_afterwards_is_released(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite"), decode={"orphan_timeout_s": PATIENCE_S}) as nodes:
        await lost(nodes)
        await nodes.decode.abandon(["another", ASKED.request_id])
        assert nodes.decode.orphans() == ()
        await nodes.settled()


async def test_orphans_are_released_after_their_time_and_with_the_node(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite"), decode={"orphan_timeout_s": 0.05}) as nodes:
        await lost(nodes)
        async with asyncio.timeout(PATIENCE_S):
            while nodes.decode.orphans():
                await asyncio.sleep(0.01)
        await nodes.settled()
    async with linked(tiny_checkpoint("granite")) as nodes:
        await lost(nodes)
        await nodes.decode.close()
        await nodes.settled()
        await lost(nodes, replace(ASKED, request_id="later"))
        assert nodes.decode.orphans() == ()


async def ids_in(feed: TokenFeed, fed: FedCall) -> list[int]:
    """All that a feed gets until it is closed, each read as soon as it comes."""
    ids: list[int] = []
    async for batch in feed.batches():
        for token_ids in batch.values():
            ids += token_ids
            fed.read(len(token_ids))
    return ids


async def test_tokens_go_by_the_feed_all_but_the_first_and_the_last_ones(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await tokens_of(opened(nodes))
        feeds = TokenFeeds()
        with feeds.opened(7) as feed:
            fed = FedCall(feeds, (7, 1))
            reading = asyncio.create_task(ids_in(feed, fed))
            own = [event async for event in opened(nodes, fed=fed) if isinstance(event, Tokens)]
            feed.close()
            ids = await reading
        first, last = own
        assert last.finish is not None
        assert [token.id for token in first.tokens] + ids + [token.id for token in last.tokens] == whole
        assert len(ids) > NUM_TOKENS // 2
        await nodes.settled()


async def test_a_router_that_reads_no_feed_gets_the_rest_by_the_calls_own_stream(tiny_checkpoint) -> None:
    asked = replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=MAX_UNREAD + 100))
    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await tokens_of(opened(nodes, asked))
        feeds = TokenFeeds()
        with feeds.opened(7) as feed:
            fed = FedCall(feeds, (7, 1))
            own = [event async for event in opened(nodes, asked, fed=fed) if isinstance(event, Tokens)]
            feed.close()
            ids = [i async for batch in feed.batches() for token_ids in batch.values() for i in token_ids]
        first, *rest = [[token.id for token in event.tokens] for event in own]
        assert first + ids + list(chain.from_iterable(rest)) == whole
        assert len(ids) == MAX_UNREAD
        await nodes.settled()


async def test_a_router_lost_while_it_is_fed_leaves_all_tokens_to_the_next_one(tiny_checkpoint) -> None:
    async with linked(tiny_checkpoint("granite")) as nodes:
        whole = await tokens_of(opened(nodes))
        feeds = TokenFeeds()
        with feeds.opened(7) as feed:
            call = asyncio.create_task(tokens_of(opened(nodes, fed=FedCall(feeds, (7, 1)))))
            batches = feed.batches()
            async with asyncio.timeout(PATIENCE_S):
                await anext(batches)
            call.cancel()
            await asyncio.wait({call}, timeout=PATIENCE_S)
            await batches.aclose()
        assert nodes.decode.orphans() == ("r",)
        assert await tokens_of(opened(nodes)) == whole
        await nodes.settled()
