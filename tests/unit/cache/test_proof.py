"""What a request without a next token has read and written is forgotten, unless others have drawn tokens from it."""

import pytest

from headrace.cache.events import BlockEvicted, BlockStored, CheckpointEvicted, CheckpointStored
from headrace.cache.hits import ReceiveState
from tests.support.cache.cache_node import FakeNode, Request

PROMPT = [*range(40)]


def admitted(node: FakeNode, tokens: list[int]) -> Request:
    request = node.admit(tokens)
    assert request is not None
    return request


def computed(node: FakeNode, tokens: list[int]) -> Request:
    request = admitted(node, tokens)
    node.prefill(request)
    return request


def serve(node: FakeNode, tokens: list[int]) -> None:
    """Computes a prompt and draws a token."""
    request = computed(node, tokens)
    node.cache.prove(request.claim)
    node.finish(request)


def give_up(node: FakeNode, request: Request) -> bool:
    """Ends a request that has no next token; True if another attempt may find one."""
    may_be_repeated = node.cache.forget_unproven(request.claim)
    node.cache.check()
    node.finish(request)
    return may_be_repeated


def found(node: FakeNode, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a prompt whose blocks, and whose state, are in the cache."""
    hit = node.match(tokens)
    return hit.attention_tokens, hit.state_tokens


def assert_nothing_in_use(node: FakeNode) -> None:
    stats = node.cache.stats()
    assert stats.blocks.in_use == stats.slots.in_use == 0


@pytest.fixture(params=[0, 8], ids=["donated", "packed"])
def node(request: pytest.FixtureRequest) -> FakeNode:
    return FakeNode(policy="every", num_packed_slots=request.param)


def test_a_request_forgets_what_it_computed_and_not_what_tokens_were_drawn_from(node: FakeNode) -> None:
    serve(node, PROMPT[:20])
    broken = computed(node, PROMPT)
    assert found(node, PROMPT) == (32, 32)
    assert not give_up(node, broken)
    assert found(node, PROMPT) == (16, 16)
    assert_nothing_in_use(node)


def test_of_an_answer_what_it_had_before_its_first_token_stays(node: FakeNode) -> None:
    broken = computed(node, PROMPT)
    node.cache.prove(broken.claim)
    node.decode(broken, [*range(100, 110)])
    text = list(broken.tokens)
    assert found(node, text)[0] == 48
    assert not give_up(node, broken)
    assert found(node, text) == (32, 32)


@pytest.mark.parametrize("length", [40, 32], ids=["emitted", "running"])
def test_it_forgets_its_states_on_blocks_that_others_published_first(length: int, node: FakeNode) -> None:
    """Two compute the same prompt at once: the first publishes the blocks, and no state. At 32 tokens the broken one
    goes on from the checkpoint that it has left: it holds it."""
    first, broken = admitted(node, PROMPT[:length]), admitted(node, PROMPT[:length])
    node.cache.publish_blocks(first.claim, first.keys, 32)
    node.cache.prove(first.claim)
    node.prefill(broken)
    assert found(node, PROMPT) == (32, 32)
    assert not give_up(node, broken)
    assert found(node, PROMPT) == (32, 0)
    node.finish(first)
    assert_nothing_in_use(node)


def test_blocks_of_others_that_it_has_not_read_stay_without_proof(node: FakeNode) -> None:
    first, broken = admitted(node, PROMPT), admitted(node, PROMPT)
    node.cache.publish_blocks(first.claim, first.keys, 32)
    node.prefill(broken)
    assert not give_up(node, broken)
    assert found(node, PROMPT) == (32, 0)
    node.finish(first)


def test_the_blocks_of_others_are_not_proven_by_its_own_copies(node: FakeNode) -> None:
    broken, beside = admitted(node, PROMPT), admitted(node, PROMPT)
    node.prefill(broken)
    node.prefill(beside)
    node.cache.prove(beside.claim)
    node.finish(beside)
    give_up(node, broken)
    assert found(node, PROMPT) == (0, 0)


def test_what_others_published_behind_it_goes_too_and_they_keep_what_they_hold(node: FakeNode) -> None:
    broken = computed(node, PROMPT[:20])
    behind = computed(node, PROMPT)
    give_up(node, broken)
    assert found(node, PROMPT) == (0, 0)
    node.finish(behind)
    assert_nothing_in_use(node)


@pytest.mark.parametrize("is_later", [False, True])
def test_one_that_reused_what_it_left_may_be_repeated_and_leaves_nothing_of_it(is_later: bool, node: FakeNode) -> None:
    """It has reused the blocks before they were forgotten, and publishes them once more."""
    broken = computed(node, PROMPT[:20])
    behind = admitted(node, PROMPT)
    if is_later:
        node.prefill(behind)
    give_up(node, broken)
    if not is_later:
        node.prefill(behind)
        assert found(node, PROMPT)[0] == 32
    assert give_up(node, behind)
    assert found(node, PROMPT) == (0, 0)
    assert not give_up(node, computed(node, PROMPT)), "it has reused nothing"
    assert_nothing_in_use(node)


def test_what_a_request_left_that_drew_nothing_is_forgotten_by_the_first_that_fails_of_it(node: FakeNode) -> None:
    """As one that a client cancelled."""
    node.finish(computed(node, PROMPT[:20]))
    assert give_up(node, computed(node, PROMPT))
    assert found(node, PROMPT) == (0, 0)


def test_a_state_without_proof_is_forgotten_on_blocks_that_are_proven(node: FakeNode) -> None:
    first, cancelled = admitted(node, PROMPT[:20]), admitted(node, PROMPT[:20])
    node.start_chunk(first, 20)
    node.cache.publish_blocks(first.claim, first.keys, 16)
    node.prefill(cancelled)
    node.cache.prove(first.claim)
    node.finish(first)
    node.finish(cancelled)
    assert found(node, PROMPT) == (16, 16)
    behind, beside = computed(node, PROMPT), computed(node, PROMPT)
    assert give_up(node, behind)
    assert found(node, PROMPT) == (16, 0)
    node.finish(beside)
    assert_nothing_in_use(node)


def test_blocks_that_a_transfer_completes_may_be_the_cause_and_the_state_there_is_not_read(node: FakeNode) -> None:
    node.finish(computed(node, PROMPT[:20]))
    received = node.admit(PROMPT, hit_policy=ReceiveState())
    assert received is not None and received.claim.reused_tokens == 16
    node.receive(received)
    node.cache.prove(received.claim)
    node.finish(received)
    behind = computed(node, PROMPT[:20])
    assert give_up(node, behind), "the state at 16 tokens is not proven"
    assert found(node, PROMPT) == (32, 0)
    node.finish(computed(node, [*range(100, 120)]))
    received = node.admit([*range(100, 140)], hit_policy=ReceiveState())
    assert received is not None
    node.receive(received)
    assert give_up(node, received), "the block of 16 tokens is not proven"
    assert found(node, [*range(100, 140)]) == (0, 0)


def test_routers_hear_of_it() -> None:
    events = []
    node = FakeNode(policy="every", on_events=events.extend)
    broken = computed(node, PROMPT)
    stored = [type(event) for event in events]
    assert (stored.count(BlockStored), stored.count(CheckpointStored)) == (2, 2)
    events.clear()
    give_up(node, broken)
    forgotten = [type(event) for event in events]
    assert (forgotten.count(BlockEvicted), forgotten.count(CheckpointEvicted)) == (2, 2)


def test_nothing_is_forgotten_of_a_request_that_published_nothing(node: FakeNode) -> None:
    request = admitted(node, PROMPT)
    assert not node.cache.forget_unproven(request.claim)
    node.prefill(request)
    assert found(node, PROMPT) == (32, 32)


def test_a_checkpoint_that_another_node_fetches_is_kept_until_it_has_it(node: FakeNode) -> None:
    broken = computed(node, PROMPT)
    checkpoint = node.cache.find_checkpoint(broken.keys[0])
    assert checkpoint is not None
    hold = node.cache.hold_checkpoint(checkpoint)
    assert hold is not None
    give_up(node, broken)
    assert found(node, PROMPT) == (0, 0) and node.cache.stats().blocks.in_use == 1
    node.cache.drop(hold)
    node.cache.check()
    assert_nothing_in_use(node)
