"""Checkpoints in a pool of their own: running states and checkpoints take no slot from each other."""

from headrace.cache.pools import PoolCounts
from headrace.cache.types import PRIMARY
from tests.support.cache.cache_node import NUM_EMISSION_SLOTS, FakeNode, Request

SIZE = 16


def admitted(node: FakeNode, num_tokens: int, kind: int = 1) -> Request:
    request = node.admit([kind] * num_tokens)
    assert request is not None
    return request


def test_a_published_state_goes_on_in_its_own_slot() -> None:
    node = FakeNode(num_packed_slots=4)
    request = admitted(node, 32)
    slot = request.claim.slot
    node.prefill(request)
    node.decode(request, [2] * 17)
    assert (request.claim.slot, request.claim.source) == (slot, None)
    assert [checkpoint.num_tokens for checkpoint in request.answer_checkpoints] == [48]
    assert request.answer_checkpoints[0].slot >= 16 + NUM_EMISSION_SLOTS, "numbered behind the running states"


def test_what_resumes_has_a_copy_and_lets_the_checkpoint_go() -> None:
    node = FakeNode(num_packed_slots=2)
    node.serve([1] * 40)
    request = admitted(node, 40)
    assert (request.num_computed, request.claim.source) == (32, None)
    assert node.slot_bytes[request.claim.slot] == (1,) * 32
    stats = node.cache.stats()
    assert stats.packed == PoolCounts(free=1, cached=1, in_use=0)
    assert stats.slots == PoolCounts(free=15, cached=0, in_use=1)
    for kind in (2, 3):
        node.serve([kind] * 40)
    assert node.match([1] * 40).state_tokens == 0, "evicted while a request that resumed from it runs"
    node.prefill(request)
    node.finish(request)


def test_running_states_evict_no_checkpoint() -> None:
    node = FakeNode(num_slots=2, num_packed_slots=2)
    node.serve([1] * 40)
    both = [admitted(node, 40, kind) for kind in (2, 3)]
    assert node.admit([4] * 40) is None
    assert node.match([1] * 40).state_tokens == 32
    for request in both:
        node.finish(request)


def test_of_more_states_than_can_be_emitted_at_once_the_highest_tiers_are_kept() -> None:
    node = FakeNode(policy="branch", checkpoint_grid_tokens=SIZE, num_packed_slots=8)
    request = admitted(node, 100)
    node.start_chunk(request, 100)
    assert request.chunk is not None
    kept = [boundary for boundary, _ in request.chunk.emit]
    assert [(each.num_tokens, each.tier == PRIMARY) for each in kept] == [(64, False), (96, True)]
    node.finish_chunk(request)
    assert request.prompt_checkpoint_positions == [64, 96]
    node.finish(request)
    assert node.cache.stats().slots == PoolCounts(free=16, cached=0, in_use=0)


def test_an_aborted_step_gives_its_slots_back() -> None:
    node = FakeNode(policy="every", num_packed_slots=8)
    request = admitted(node, 100)
    node.start_chunk(request, 100)
    node.finish(request)
    assert node.cache.stats().slots.in_use == 0
    again = admitted(node, 100, 2)
    node.start_chunk(again, 100)
    assert again.chunk is not None and len(again.chunk.emit) == NUM_EMISSION_SLOTS
    node.finish(again)


def test_one_prefix_fills_half_of_the_packed_slots() -> None:
    node = FakeNode(policy="every", num_blocks=64, num_packed_slots=4)
    node.serve([1] * 40)
    for _ in range(2):
        request = admitted(node, 200, 2)
        node.prefill(request, chunk=SIZE)
        node.finish(request)
    assert node.match([1] * 40).state_tokens == 32
    assert node.cache.stats().packed == PoolCounts(free=0, cached=4, in_use=0)
