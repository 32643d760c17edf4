"""What a network can do to a transfer, and that a receiver survives it."""

import pytest

from tests.support.loop_clock import leap, turns
from tests.support.transfer.faulty import duplicate, flip_bit, lose, swap_with_next, truncate
from tests.support.transfer.transfer_pair import Pair, failure
from tests.support.transfer.transfer_plans import small_plan
from transfer.protocol.envelope import ENVELOPE_BYTES, Tag

NONCE = 7


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("byte", [0, 99])
async def test_a_flipped_payload_bit_fails_the_session_and_nothing_lands_after_it(index, byte):
    pair, plan = Pair(flip_bit(Tag(NONCE, index, True), byte)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    assert (await failure(incoming)).cause == "wrong_digest"
    await turns()
    assert [message.index for message, _ in pair.landed] == list(range(index))
    assert pair.decode.stats.failures == {"wrong_digest": 1}
    await pair.assert_staging_returns()


@pytest.mark.parametrize("byte", range(ENVELOPE_BYTES))
async def test_a_flipped_envelope_bit_never_lands_a_message(byte):
    pair, plan = Pair(flip_bit(Tag(NONCE, 1, False), byte)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan, 42)
    failed = await failure(incoming)
    assert failed.cause == "wrong_order", "the envelope is refused, so the one behind it comes too early"
    assert pair.decode.stats.refusals == {"wrong_mac": 1, "no_envelope": 1}
    assert [message.index for message, _ in pair.landed] == [0]
    await pair.assert_staging_returns()


async def test_a_flipped_bit_of_the_first_token_is_noticed():
    first_token_at = 36
    pair, plan = Pair(flip_bit(Tag(NONCE, 2, False), first_token_at)), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan, 42)
    await turns()
    leap()
    assert (await failure(incoming)).cause == "deadline", "there is no envelope behind the last one"
    assert pair.decode.stats.refusals == {"wrong_mac": 1, "no_envelope": 1}
    assert [message.index for message, _ in pair.landed] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "cause", "landed"),
    [
        # a repeated part comes behind those that wait already, which are as planned and may land
        (duplicate(Tag(NONCE, 0, False)), "wrong_order", [0, 1]),
        (swap_with_next(Tag(NONCE, 0, False)), "wrong_order", []),
        (swap_with_next(Tag(NONCE, 0, True)), "wrong_order", []),
        (swap_with_next(Tag(NONCE, 1, True)), "wrong_order", [0]),
        (truncate(Tag(NONCE, 0, False)), "wrong_order", []),
        (truncate(Tag(NONCE, 1, True)), "wrong_size", [0]),
        (lose(Tag(NONCE, 0, False)), "wrong_order", []),
        (lose(Tag(NONCE, 1, True)), "wrong_order", [0]),
    ],
)
async def test_a_message_repeated_swapped_cut_or_lost_fails_the_session(fault, cause, landed):
    pair, plan = Pair(fault), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    assert (await failure(incoming)).cause == cause
    await turns()
    indices = [message.index for message, _ in pair.landed]
    assert indices == landed[: len(indices)]  # a landing not yet begun when the session failed does not begin
    await pair.assert_staging_returns()


async def test_a_lost_last_message_fails_both_ways_at_the_deadline():
    pair, plan = Pair(lose(Tag(NONCE, 2, True))), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    await turns()
    leap()
    failed = await failure(incoming)
    assert failed.cause == "deadline"
    assert "2 arrived and 2 landed of 3" in str(failed)
    await pair.assert_staging_returns()


@pytest.mark.parametrize("index", range(3))
async def test_a_payload_that_comes_again_is_refused_and_changes_nothing(index):
    """No envelope announced it. The last one's may also come after the landing, and is dropped."""
    pair, plan = Pair(duplicate(Tag(NONCE, index, True))), small_plan(NONCE)
    incoming = pair.expect(plan)
    pair.send_all(plan)
    await incoming.landed()
    await turns()
    pair.assert_landed_whole(plan)
    assert set(pair.decode.stats.refusals) <= {"no_envelope"}
    await pair.assert_staging_returns()
