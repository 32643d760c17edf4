"""A plan is the same few messages on both sides, whatever the prompt's length."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transfer.transfer_plans import small_plan
from transfer.protocol.errors import LayoutMismatch
from transfer.protocol.plan import PlannedMessage, TransferPlan


def test_blocks_beyond_the_hit_are_packed_and_the_state_comes_last():
    assert small_plan().messages == (
        PlannedMessage(0, first_block=2, num_blocks=2, attention_bytes=200, state_bytes=0, sendable_tokens=16),
        PlannedMessage(1, first_block=4, num_blocks=1, attention_bytes=100, state_bytes=0, sendable_tokens=18),
        PlannedMessage(2, first_block=5, num_blocks=0, attention_bytes=0, state_bytes=300, sendable_tokens=18),
    )


@pytest.mark.parametrize(("state_bytes", "num_messages"), [(1, 2), (150, 2), (151, 3)])
def test_the_state_goes_with_the_last_blocks_where_one_message_holds_both(state_bytes, num_messages):
    *others, last = small_plan(state_bytes=state_bytes).messages
    assert [message.state_bytes for message in others] == [0] * (num_messages - 1)
    assert (last.num_bytes, last.state_bytes) == (last.attention_bytes + state_bytes, state_bytes)
    assert [message.num_blocks for message in (*others, last)] == [2, 1, 0][:num_messages]


def test_a_receiver_with_every_block_still_gets_the_state():
    plan = small_plan(num_tokens=16, first_block=4)
    assert plan.messages == (PlannedMessage(0, 4, 0, 0, 300, sendable_tokens=16),)
    assert (plan.attention_blocks, plan.attention_tokens, plan.attention_bytes) == (0, 0, 0)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)])
def test_a_partial_last_block_moves_whole_and_waits_for_the_last_token(num_tokens, blocks):
    plan = small_plan(num_tokens=num_tokens, first_block=0, block_size=16, max_message_bytes=100)
    attention = plan.messages[:-1]
    assert [message.first_block for message in attention] == list(range(blocks))
    assert attention[-1].sendable_tokens == num_tokens
    assert [message.sendable_tokens for message in attention[:-1]] == [16 * (i + 1) for i in range(blocks - 1)]


def test_only_what_the_receiver_lacks_is_counted():
    plan = small_plan()
    assert (plan.attention_tokens, plan.attention_bytes, plan.total_bytes) == (10, 300, 600)
    assert plan.largest_message_bytes == 300


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nonce": 0}, "nonce 0x0"),
        ({"nonce": 1 << 48}, "nonce 0x1000000000000"),
        ({"num_tokens": 0}, "num_tokens 0 < 1"),
        ({"state_bytes": 0}, "state_bytes 0 < 1"),
        ({"first_block": 6}, "first_block 6 is not in 0..5"),
        ({"first_block": -1}, "first_block -1 is not in 0..5"),
        ({"max_message_bytes": 99}, "max_message_bytes 99 < block_bytes 100"),
        ({"num_tokens": 1 << 20, "max_message_bytes": 100}, "raise max_message_bytes"),
    ],
)
def test_numbers_that_make_no_plan_are_refused_with_the_value_and_the_limit(changes, said):
    with pytest.raises(LayoutMismatch, match=said):
        small_plan(**changes)


@given(
    num_tokens=st.integers(1, 3000),
    hit=st.integers(0, 200),
    block_size=st.sampled_from([1, 8, 16]),
    block_bytes=st.integers(1, 50),
    slack=st.integers(0, 500),
)
def test_messages_cover_each_missing_block_once_in_order(num_tokens, hit, block_size, block_bytes, slack):
    blocks = -(-num_tokens // block_size)
    plan = TransferPlan(
        nonce=1,
        num_tokens=num_tokens,
        first_block=min(hit, blocks),
        block_size=block_size,
        block_bytes=block_bytes,
        state_bytes=9,
        max_message_bytes=block_bytes + slack,
    )
    moved = [block for m in plan.messages for block in range(m.first_block, m.first_block + m.num_blocks)]
    assert moved == list(range(plan.first_block, blocks))
    assert all(0 < m.num_bytes <= plan.max_message_bytes for m in plan.messages if m.num_blocks)
    assert all(m.attention_bytes == m.num_blocks * block_bytes for m in plan.messages)
    assert [m.index for m in plan.messages] == list(range(len(plan.messages)))
    assert [m.state_bytes for m in plan.messages] == [0] * (len(plan.messages) - 1) + [9]
    sendable = [m.sendable_tokens for m in plan.messages]
    assert sendable == sorted(sendable)
    assert sendable[-1] == num_tokens


def test_plans_of_equal_numbers_are_equal_values():
    assert small_plan() == small_plan()
    assert small_plan() != dataclasses.replace(small_plan(), nonce=8)
