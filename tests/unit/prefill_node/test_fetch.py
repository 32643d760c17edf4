"""A prefill node fetches from a decode node, over a link that does what the test says: one process, real engines."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.request import Request
from headrace.wire.errors import DeadlineExceeded, NodeLost
from headrace.wire.messages import FetchReply, FetchRequest, PrefillRequest, Reservation
from node_runtime.config import FetchConfig
from tests.support.cluster.nodes import total
from tests.support.engine.driving import GREEDY, request
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.node.linked_roles import ALWAYS, TIMEOUT_S, linked
from tests.support.transfer.faulty import FaultyTransport, duplicate, flip_bit, truncate
from transfer.backend import Arrival
from transfer.protocol.authentication import new_secret
from transfer.protocol.errors import LayoutMismatch
from transfer.protocol.events import Cause

TURN = random_prompt(40, seed=7)
ANSWER_TOKENS = 100
KNOWN = 128  # of the 139 tokens that the decode node computes: its newest checkpoint


def next_turn(answer: list[int]) -> Request:
    return request([*TURN, *answer, *random_prompt(21, seed=8)])


@pytest.fixture
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen35")


@pytest.fixture
def asked(model: Path) -> Request:
    return next_turn(greedy(model, TURN, ANSWER_TOKENS))


@pytest.fixture
def expected(model: Path, asked: Request) -> int:
    return greedy(model, asked.tokens, 1)[0]


LONG = request(TURN, replace(GREEDY, max_tokens=ANSWER_TOKENS))


@pytest.mark.parametrize("family", ["granite", "granite_moe", "qwen35", "qwen35_moe"])
async def test_what_the_decode_node_generated_is_fetched_and_found_again(family: str, tiny_checkpoint) -> None:
    model = tiny_checkpoint(family)
    async with linked(model) as nodes:
        answer = await nodes.generate(LONG)
        await nodes.first_token(request(TURN), None)
        prompt = next_turn(answer)
        token, report = await nodes.first_token(prompt, KNOWN)
        assert token == greedy(model, prompt.tokens, 1)[0]
        # Its own: 2 of the 3 blocks that it computed lie in the first 40 tokens, and the last boundary is there.
        assert (report.attention_hit_tokens, report.state_hit_tokens) == (32, 32)
        assert (report.fetched_tokens, report.resumed_tokens) == (KNOWN - 32, KNOWN)
        assert report.computed_tokens == len(prompt.tokens) - KNOWN
        assert report.checkpoints[0] == KNOWN
        layout = nodes.prefill_runtime.layout
        moved = (KNOWN - 32) // 16 * layout.block_bytes + layout.state_bytes
        counters = nodes.fetches.counters()
        assert (counters["fetches"], counters["fetched_bytes"]) == (1, moved)
        exported = nodes.fetch_source.fetch_server.counters()
        assert (exported["fetches_served"], exported["fetch_served_bytes"]) == (1, moved)

        other = request([*prompt.tokens[: KNOWN + 2], *random_prompt(9)])
        token, report = await nodes.first_token(other, KNOWN)
        assert token == greedy(model, other.tokens, 1)[0]
        assert (report.fetched_tokens, report.state_hit_tokens) == (0, KNOWN)
        await nodes.settled()


async def test_blocks_that_are_here_do_not_move_again(model: Path, asked: Request) -> None:
    async with linked(model) as nodes:
        await nodes.generate(LONG)
        await nodes.first_token(asked, None)  # all its blocks are here now, and a checkpoint at its end alone
        parting = request([*asked.tokens[: KNOWN + 2], *random_prompt(30)])
        token, report = await nodes.first_token(parting, KNOWN)
        assert token == greedy(model, parting.tokens, 1)[0]
        assert (report.attention_hit_tokens, report.state_hit_tokens, report.fetched_tokens) == (KNOWN, 0, KNOWN)
        assert nodes.fetches.counters()["fetched_bytes"] == nodes.prefill_runtime.layout.state_bytes
        await nodes.settled()


def at_first_payload(fault: Callable[..., Callable[..., None]]) -> Callable[..., None]:
    """The fault, at the first payload of whatever session comes."""
    chosen: list[Callable[..., None]] = []

    def act(part: Arrival, deliver: Callable[[Arrival], None]) -> None:
        if part.tag.is_payload and not chosen:
            chosen.append(fault(part.tag))
        (chosen[0] if chosen else lambda part, deliver: deliver(part))(part, deliver)

    return act


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(flip_bit, "wrong_digest"), (truncate, "wrong_size")],
)
async def test_bytes_that_changed_on_their_way_are_computed_instead(model, asked, expected, fault, cause) -> None:
    async with linked(model, distort=lambda inner: FaultyTransport(inner, at_first_payload(fault))) as nodes:
        await nodes.generate(LONG)
        token, report = await nodes.first_token(asked, KNOWN)
        assert token == expected
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(asked.tokens))
        assert nodes.fetches.counters()[f"cause={cause}/fetch_failures"] == 1
        # Nothing of it was published: the next one finds what this node computed, and no more.
        await nodes.settled()


async def test_bytes_that_come_twice_are_taken_once(model, asked, expected) -> None:
    async with linked(model, distort=lambda inner: FaultyTransport(inner, at_first_payload(duplicate))) as nodes:
        await nodes.generate(LONG)
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens) == (expected, KNOWN)
        assert nodes.prefill_runtime.transport.stats.refusals == {"no_envelope": 1}
        await nodes.settled()


async def test_a_source_that_dies_in_the_middle_costs_no_token(model, asked, expected) -> None:
    dying: list[asyncio.Task[None]] = []

    async with linked(model, max_message_bytes=1 << 15) as nodes:
        await nodes.generate(LONG)
        inner = nodes.prefill_runtime.transport
        expect = inner.expect

        def die_at_the_third_part(nonce, inbox) -> None:
            arrived = 0

            class Dying:
                def announced(self, arrival: Arrival) -> None:
                    nonlocal arrived
                    arrived += 1
                    if arrived == 3:
                        dying.append(asyncio.ensure_future(nodes.decode_runtime.transport.close()))
                    inbox.announced(arrival)

            expect(nonce, Dying())

        inner.expect = die_at_the_third_part
        token, report = await nodes.first_token(asked, KNOWN)
        assert dying and token == expected
        assert (report.fetched_tokens, report.computed_tokens) == (0, len(asked.tokens))
        assert total(nodes.fetches.counters(), "fetch_failures") == 1
        await nodes.settled()


@pytest.mark.parametrize(
    ("error", "cause"), [(NodeLost("d0", "gone"), "fetch_source_lost"), (DeadlineExceeded("d0", "late"), "deadline")]
)
async def test_a_source_that_cannot_be_reached_costs_no_token(model, asked, expected, error, cause) -> None:
    def fail() -> None:
        raise error

    async with linked(model) as nodes:
        await nodes.generate(LONG)
        nodes.fetch_source.before = fail
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens) == (expected, 0)
        assert nodes.fetches.counters()[f"cause={cause}/fetch_failures"] == 1
        await nodes.settled()


async def test_a_stale_hint_costs_no_token(model, asked, expected) -> None:
    async with linked(model) as nodes:
        await nodes.generate(LONG)
        token, report = await nodes.first_token(asked, KNOWN - 16)  # blocks, but no checkpoint any more
        assert (token, report.fetched_tokens) == (expected, 0)
        assert nodes.fetches.counters()["cause=gone/fetch_failures"] == 1
        assert nodes.fetch_source.fetch_server.counters()["fetches_gone"] == 1
        await nodes.settled()


async def test_another_tenants_prompt_is_not_to_be_had(model, asked, expected) -> None:
    async with linked(model) as nodes:
        await nodes.generate(replace(LONG, salt=b"theirs"))
        token, report = await nodes.first_token(replace(asked, salt=b"ours"), KNOWN)
        assert (token, report.fetched_tokens) == (expected, 0)
        assert nodes.fetches.counters()["cause=gone/fetch_failures"] == 1
        token, report = await nodes.first_token(replace(asked, salt=b"theirs"), KNOWN)
        assert (token, report.fetched_tokens) == (expected, KNOWN)
        await nodes.settled()


async def test_a_source_of_another_layout_is_not_believed(model, asked, expected) -> None:
    async with linked(model) as nodes:
        await nodes.generate(LONG)
        nodes.fetch_source.reply = lambda reply: replace(reply, layout=replace(reply.layout, fingerprint="other"))
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens) == (expected, 0)
        assert nodes.fetches.counters()["cause=refused/fetch_failures"] == 1
        await nodes.settled()


async def test_a_source_refuses_another_layout(model, asked) -> None:
    async with linked(model) as nodes:
        await nodes.generate(LONG)
        await nodes.first_token(asked, KNOWN)
        fetch = nodes.fetch_source.requests[0]
        (own,) = fetch.reservation.layout.attention_groups
        layout = replace(fetch.reservation.layout, attention_groups=(replace(own, num_heads=3),))
        with pytest.raises(LayoutMismatch, match="attention group 0: num_heads 2 != 3: restart one"):
            await nodes.fetch_source.fetch_server.run(
                replace(fetch, reservation=replace(fetch.reservation, layout=layout)), 5.0
            )
        await nodes.settled()


async def test_an_abort_while_it_fetches_gives_everything_back(model, asked, expected) -> None:
    reached = asyncio.Event()

    async with linked(model) as nodes:
        await nodes.generate(LONG)
        nodes.fetch_source.before = reached.set
        asking = asyncio.create_task(nodes.first_token(asked, KNOWN))
        await reached.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await nodes.settled()
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens) == (expected, KNOWN)
        await nodes.settled()


async def test_a_hand_over_does_not_begin_before_the_fetch_is_over(model, asked) -> None:
    """Its clock would run meanwhile, and hold the decode node's connection."""
    called = asyncio.Event()

    async def never_answer(fetch: FetchRequest, *, timeout_s: float) -> FetchReply:
        called.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with linked(model, fetch=replace(ALWAYS, timeout_s=TIMEOUT_S)) as nodes:
        nodes.fetch_source.fetch = never_answer
        layout = nodes.decode_runtime.layout
        reservation = Reservation(1, 0, len(asked.tokens), "nowhere", layout, TIMEOUT_S, new_secret())
        work = PrefillRequest(asked, reservation, fetch_source=nodes.known(KNOWN))
        asking = asyncio.ensure_future(anext(nodes.prefill.run(work, TIMEOUT_S)))
        async with asyncio.timeout(TIMEOUT_S / 4):
            await called.wait()
            assert not asking.done(), "it would have failed to connect"
            asking.cancel()
            await asyncio.wait([asking])
            await nodes.settled()


async def test_every_cause_of_a_failed_fetch_is_counted_from_the_start(model) -> None:
    """So that a rate sees the first one, whatever it dies of."""
    async with linked(model) as nodes:
        counters = nodes.fetches.counters()
        counted = {name for name, value in counters.items() if name.endswith("/fetch_failures") and value == 0}
        causes = {*(str(cause) for cause in Cause), "gone", "refused", "transfer_broken", "busy", "fetch_source_lost"}
        assert counted == {f"cause={cause}/fetch_failures" for cause in causes}
        assert "fetch_failures" not in counters, "one name has the same labels wherever it is counted"


async def test_off_means_that_nobody_is_asked(model, asked, expected) -> None:
    async with linked(model, fetch=replace(ALWAYS, enabled=False)) as nodes:
        await nodes.generate(LONG)
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens, report.computed_tokens) == (expected, 0, len(asked.tokens))
        assert nodes.fetch_source.requests == []
        await nodes.settled()


async def test_what_does_not_pay_is_computed_and_counted(model, asked, expected) -> None:
    async with linked(model, fetch=FetchConfig(min_tokens=1, max_time_ratio=1e-9)) as nodes:
        await nodes.generate(LONG)
        token, report = await nodes.first_token(asked, KNOWN)
        assert (token, report.fetched_tokens) == (expected, 0)
        assert nodes.fetches.counters()["fetches_declined"] == 1
        assert nodes.fetch_source.requests == []
        await nodes.settled()
