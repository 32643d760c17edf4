"""The cache's part of the scenarios that a hybrid prefix cache must get right, with their numbers."""

from dataclasses import replace

import pytest

from headrace.cache.errors import NotHeld
from headrace.cache.hits import PrefixHit, ReceiveState, ResumeLocally
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.cache.leases import Leases
from tests.support.cache.cache_node import FakeNode, Request


def text(num_tokens: int, kind: int) -> list[int]:
    """A stretch of text; the same kind always starts alike, two kinds share nothing."""
    return [kind * 100_000 + position for position in range(num_tokens)]


def admitted(node: FakeNode, tokens: list[int], **options) -> Request:
    request = node.admit(tokens, **options)
    assert request is not None
    return request


def test_1_a_short_prompt_takes_four_blocks_and_one_slot_and_caches_no_tombstone() -> None:
    node = FakeNode(policy="align")
    request = admitted(node, text(55, 1))
    assert len(request.claim.block_ids) == 4
    assert node.cache.stats().slots.in_use == 1
    assert node.match(text(55, 1)) == PrefixHit(0, 0, 0)

    node.start_chunk(request, 55)
    assert node.match(text(55, 1)) == PrefixHit(0, 0, 0)
    node.finish_chunk(request)
    node.finish(request)

    assert request.prompt_checkpoint_positions == [48]
    stats = node.cache.stats()
    assert (stats.blocks.cached, stats.slots.cached) == (3, 1)
    node.evict_states(1)
    assert node.match(text(55, 1)) == PrefixHit(attention_tokens=48, state_tokens=0, resumable_tokens=0)


@pytest.mark.parametrize(("policy", "of_the_first"), [("align", 48), ("branch", 32)])
def test_2_a_longer_prompt_resumes_at_the_kept_boundary_of_the_first(policy, of_the_first) -> None:
    node = FakeNode(policy=policy)
    node.serve(text(48, 1))
    longer = admitted(node, text(48, 1) + text(7, 2))
    assert longer.claim.hit == PrefixHit(48, of_the_first, of_the_first)
    assert longer.claim.branch_point == (None if of_the_first == 48 else 48)


@pytest.mark.parametrize(("policy", "num_tokens"), [("align", 48), ("branch", 64)])
def test_2_the_first_to_leave_a_prefix_leaves_a_checkpoint_there_for_the_third(policy, num_tokens) -> None:
    node = FakeNode(policy=policy)
    node.serve(text(num_tokens, 1))
    second = admitted(node, text(32, 1) + text(20, 3))
    assert second.claim.hit == PrefixHit(attention_tokens=32, state_tokens=0, resumable_tokens=0)
    assert (second.claim.branch_point, second.claim.reused_tokens) == (32, 0)
    node.prefill(second)
    assert 32 in second.prompt_checkpoint_positions
    node.finish(second)

    third = admitted(node, text(32, 1) + text(25, 4))
    assert third.claim.hit == PrefixHit(attention_tokens=32, state_tokens=32, resumable_tokens=32)
    assert third.claim.branch_point is None


@pytest.mark.parametrize(("policy", "hints"), [("every", ()), ("branch", (32,)), ("branch", (39,))])
def test_3_a_boundary_known_beforehand_serves_the_second_sharer_already(policy, hints) -> None:
    node = FakeNode(policy=policy)
    node.serve(text(48, 1), hints=hints)
    second = admitted(node, text(32, 1) + text(20, 3))
    assert second.claim.hit == PrefixHit(attention_tokens=32, state_tokens=32, resumable_tokens=32)


@pytest.mark.parametrize(
    ("policy", "hints", "share_of_second"),
    [("align", (), 0.0), ("every", (), 0.356), ("branch", (1632,), 0.356)],
)
def test_4_cached_shares_of_a_long_prompt_with_a_shared_start(policy, hints, share_of_second) -> None:
    node = FakeNode(policy=policy, num_blocks=1024, num_slots=600)
    second = text(1632, 1) + text(4584 - 1632, 2)
    node.serve(text(4584, 1), hints=hints)
    shares = [node.serve(second, hints=hints).claim.reused_tokens / 4584 for _ in range(2)]
    if share_of_second:
        assert shares[0] >= share_of_second
    else:
        assert shares[0] == 0
    assert shares[1] >= 0.949


def test_5_a_state_is_evicted_alone_and_its_blocks_still_serve_a_transfer() -> None:
    node = FakeNode(policy="none", eviction="lru")
    tokens = text(65, 1)
    first = admitted(node, tokens)
    node.policy = FakeNode(policy="every").policy
    node.start_chunk(first, 33)
    assert first.chunk is not None
    first.chunk.emit.reverse()  # 32 before 16: it is the older one
    node.finish_chunk(first)
    node.policy = FakeNode(policy="none").policy
    node.prefill(first)
    assert node.match(tokens) == PrefixHit(attention_tokens=64, state_tokens=32, resumable_tokens=32)

    node.evict_states(1)
    assert node.match(tokens) == PrefixHit(attention_tokens=64, state_tokens=16, resumable_tokens=16)
    received = admitted(node, tokens, hit_policy=ReceiveState())
    assert (received.claim.reused_tokens, received.claim.source_slot) == (64, None)


def test_6_a_decode_node_with_all_blocks_and_no_state_needs_the_state_only() -> None:
    node = FakeNode(policy="none")
    node.serve(text(65, 1))
    request = admitted(node, text(65, 1), hit_policy=ReceiveState())
    assert request.claim.hit == PrefixHit(attention_tokens=64, state_tokens=0, resumable_tokens=0)
    assert request.claim.reused_tokens == 64
    assert len(request.claim.block_ids) == 5
    assert (request.claim.source, request.claim.branch_point) == (None, None)
    node.receive(request)
    node.decode(request, text(3, 9))


def test_6_a_prompt_of_whole_blocks_is_reused_whole_when_its_state_arrives() -> None:
    node = FakeNode(policy="none")
    node.serve(text(64, 1))
    assert admitted(node, text(64, 1), hit_policy=ReceiveState()).claim.reused_tokens == 64


def test_7_without_a_transfer_the_same_node_uses_the_common_hit() -> None:
    node = FakeNode(policy="none")
    node.serve(text(65, 1))
    request = admitted(node, text(65, 1), hit_policy=ResumeLocally())
    assert request.claim.hit.attention_tokens == 64
    assert request.claim.reused_tokens == 0
    node.prefill(request)


def test_8_a_checkpoint_of_this_step_is_resumed_from_in_the_next_one_only() -> None:
    node = FakeNode(policy="branch")
    tokens = text(65, 1)
    publisher, same_step = admitted(node, tokens), admitted(node, tokens)
    for request in (publisher, same_step):
        node.start_chunk(request, 65)
    admitted_mid_step = admitted(node, tokens)
    assert admitted_mid_step.claim.hit.resumable_tokens == 0
    for request in (publisher, same_step):
        node.finish_chunk(request)
    assert same_step.claim.reused_tokens == 0
    assert admitted(node, tokens).claim.reused_tokens == 64


def test_9_siblings_resume_from_one_checkpoint_without_touching_it() -> None:
    node = FakeNode(policy="branch")
    node.serve(text(65, 1))
    siblings = [admitted(node, text(64, 1) + text(5, kind)) for kind in (2, 3, 4)]
    (source,) = {sibling.claim.source_slot for sibling in siblings}
    assert source is not None
    before = node.slot_bytes[source]
    assert len({sibling.claim.slot for sibling in siblings} | {source}) == 4

    for sibling in siblings:
        node.start_chunk(sibling, 69)
    assert node.slot_bytes[source] == before == tuple(text(64, 1))
    for sibling in siblings:
        node.finish_chunk(sibling)
        assert sibling.claim.source_slot is None
    assert node.match(text(65, 1)).resumable_tokens == 64


def test_10_a_checkpoint_being_read_is_not_evicted() -> None:
    node = FakeNode(policy="branch", num_slots=3)
    node.serve(text(65, 1))
    reader = admitted(node, text(65, 1))
    assert reader.claim.source_slot is not None
    last = node.cache.reserve_slot(reader.claim)
    assert last is not None and last != reader.claim.source_slot
    assert node.cache.reserve_slot(reader.claim) is None
    node.cache.release_slot(reader.claim, last)
    node.prefill(reader)  # reads the checkpoint, and compares it

    node.evict_states(1)
    assert node.match(text(65, 1)).resumable_tokens == 0


def test_10_a_leased_checkpoint_keeps_its_slot_and_blocks_until_the_deadline() -> None:
    node = FakeNode(policy="branch", num_slots=2, num_blocks=6)
    first = admitted(node, text(65, 1))
    node.start_chunk(first, 65)
    (slot,) = first.emitting
    checkpoint = node.cache.publish_checkpoint(first.claim, first.keys[3], 64, slot)
    assert checkpoint is None  # no blocks below it yet
    assert first.chunk is not None
    first.chunk.emit.clear()
    node.finish_chunk(first)
    assert node.cache.donate_running(first.claim, first.keys[3], 64)
    held = first.claim.source
    assert held is not None
    hold = node.cache.hold_checkpoint(held)
    assert hold is not None
    node.cache.state_written(first.claim)
    node.finish(first)

    now_s = 100.0
    leases = Leases(lambda: now_s)
    leases.grant(lambda: node.cache.drop(hold), deadline_s=130.0)
    assert node.admit(text(48, 2)) is None  # four of six blocks are leased
    assert node.cache.stats().slots.in_use == 1
    assert leases.expire(129.9) == []
    assert len(leases.expire(130.0)) == 1
    admitted(node, text(48, 2))
    assert node.cache.stats().slots.in_use == 1


@pytest.mark.parametrize(
    ("num_tokens", "resumable"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]
)
@pytest.mark.parametrize("policy", ["branch", "every"])
def test_11_the_same_prompt_again_always_computes_at_least_one_token(num_tokens, resumable, policy) -> None:
    node = FakeNode(policy=policy)
    node.serve(text(num_tokens, 1))
    again = admitted(node, text(num_tokens, 1))
    assert again.claim.reused_tokens == again.claim.hit.resumable_tokens == resumable < num_tokens
    node.prefill(again)


@pytest.mark.parametrize("phase", ["queued", "reserved", "prefilling", "moving", "landed", "decoding"])
def test_12_an_abort_in_any_phase_returns_both_pools(phase) -> None:
    node = FakeNode(policy="every", num_blocks=16, num_slots=12)
    empty = node.cache.stats()
    remote = phase in ("moving", "landed", "decoding")
    if phase == "queued":
        node.match(text(65, 1))
        assert node.cache.stats() == empty
        return
    request = admitted(node, text(65, 1), hit_policy=ReceiveState() if remote else ResumeLocally())
    if phase == "prefilling":
        node.start_chunk(request, 40)
        assert request.emitting
    if phase in ("landed", "decoding"):
        node.receive(request)
    if phase == "decoding":
        node.decode(request, text(40, 9))
        assert request.answer_checkpoints
    node.finish(request)

    stats = node.cache.stats()
    assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)
    assert stats.blocks.free + stats.blocks.cached == empty.blocks.free
    assert stats.slots.free + stats.slots.cached == empty.slots.free
    if phase in ("reserved", "prefilling", "moving"):
        assert (stats.blocks, stats.slots) == (empty.blocks, empty.slots)


def test_13_what_comes_late_for_a_dead_request_cannot_touch_its_successor() -> None:
    node = FakeNode(policy="branch", num_blocks=5, num_slots=2)
    dead = admitted(node, text(65, 1), hit_policy=ReceiveState())
    node.finish(dead)
    successor = admitted(node, text(65, 2), hit_policy=ReceiveState())
    assert set(successor.claim.block_ids) == set(dead.claim.block_ids)
    for late in (
        lambda: node.cache.publish_blocks(dead.claim, dead.keys, 65),
        lambda: node.cache.donate_running(dead.claim, dead.keys[3], 64),
        lambda: node.cache.state_written(dead.claim),
        lambda: node.cache.extend(dead.claim, 80),
        lambda: node.cache.release(dead.claim),
    ):
        with pytest.raises(NotHeld, match="released"):
            late()
        node.cache.check()
    assert node.match(text(65, 1)) == PrefixHit(0, 0, 0)
    node.receive(successor)
    node.decode(successor, text(3, 9))


def test_15_an_expired_lease_gives_back_once() -> None:
    node = FakeNode(num_blocks=5)
    request = admitted(node, text(65, 1))
    now_s = 0.0
    leases = Leases(lambda: now_s)
    lease = leases.grant(lambda: node.finish(request), deadline_s=10.0)
    now_s = 10.0
    assert leases.expire() == [lease]
    assert not leases.release(lease)
    assert node.cache.stats().blocks.in_use == 0


def test_17_each_turn_of_a_chat_finds_the_whole_previous_turn_less_one_block() -> None:
    node = FakeNode(policy="branch", num_blocks=128)
    conversation = text(37, 1)
    for turn in range(5):
        previous = 0 if turn == 0 else len(conversation)
        prompt = conversation + text(21, 10 + turn)
        answer = text(30 + turn, 20 + turn)
        request = node.serve(prompt, answer=answer)
        if turn:
            assert request.claim.reused_tokens >= previous - 16
        conversation = prompt + answer
    # Of each answer, only the newest boundary was kept.
    assert node.cache.stats().slots.cached <= 2 * 5


def test_18_two_tenants_with_the_same_prompt_share_nothing() -> None:
    node = FakeNode(policy="every")
    node.serve(text(65, 1), salt=b"tenant a")
    assert node.match(text(65, 1), salt=b"tenant a").resumable_tokens == 64
    assert node.match(text(65, 1), salt=b"tenant b") == PrefixHit(0, 0, 0)
    other = admitted(node, text(65, 1), salt=b"tenant b")
    assert (other.claim.reused_tokens, other.claim.branch_point) == (0, None)


def test_20_states_of_another_width_are_refused_not_mixed_up() -> None:
    attention, whole = AttentionGroup(2, 2, 32), StateGroup(6, (576, 3), (6, 32, 32))
    layout = CacheLayout("model", "float32", "float32", 16, (attention,), (whole,))
    half = replace(layout, state_groups=(StateGroup(6, (288, 3), (3, 32, 32)),))
    assert layout.mismatch(half) == "state group 0: conv_shape (576, 3) != (288, 3)"
