"""What a request has published is forgotten again, where its blocks and states are no numbers."""

from headrace.cache.events import BlockEvicted, BlockStored, CheckpointEvicted, CheckpointStored
from tests.support.cache.cache_node import FakeNode, Request

PROMPT = [*range(40)]


def admitted(node: FakeNode, tokens: list[int]) -> Request:
    request = node.admit(tokens)
    assert request is not None
    return request


def found(node: FakeNode, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a prompt whose blocks, and whose state, are in the cache."""
    hit = node.match(tokens)
    return hit.attention_tokens, hit.state_tokens


def test_a_request_forgets_what_it_computed_and_not_what_it_reused() -> None:
    node = FakeNode(policy="every")
    node.serve(PROMPT[:20])
    broken = admitted(node, PROMPT)
    node.prefill(broken)
    assert found(node, PROMPT) == (32, 32)
    node.cache.forget_own(broken.claim)
    node.cache.check()
    node.cache.release(broken.claim)
    assert found(node, PROMPT) == (16, 16)
    assert node.cache.stats().blocks.in_use == node.cache.stats().slots.in_use == 0


def test_it_forgets_its_states_on_blocks_that_others_published_first() -> None:
    """Two compute the same prompt at once: the first publishes the blocks, and no state."""
    node = FakeNode(policy="every")
    first, broken = admitted(node, PROMPT), admitted(node, PROMPT)
    node.cache.publish_blocks(first.claim, first.keys, 32)
    node.prefill(broken)
    node.cache.forget_own(broken.claim)
    node.cache.check()
    node.cache.release(broken.claim)
    assert found(node, PROMPT) == (32, 0)


def test_what_others_published_behind_it_goes_too_and_they_keep_what_they_hold() -> None:
    node = FakeNode(policy="every")
    broken = admitted(node, PROMPT[:20])
    node.prefill(broken)
    behind = admitted(node, PROMPT)
    node.prefill(behind)
    node.cache.forget_own(broken.claim)
    node.cache.check()
    assert found(node, PROMPT) == (0, 0)
    node.cache.release(broken.claim)
    node.cache.release(behind.claim)
    node.cache.check()
    assert node.cache.stats().blocks.in_use == node.cache.stats().slots.in_use == 0


def test_routers_hear_of_it() -> None:
    events = []
    node = FakeNode(policy="every", on_events=events.extend)
    broken = admitted(node, PROMPT)
    node.prefill(broken)
    stored = [type(event) for event in events]
    assert (stored.count(BlockStored), stored.count(CheckpointStored)) == (2, 2)
    events.clear()
    node.cache.forget_own(broken.claim)
    forgotten = [type(event) for event in events]
    assert (forgotten.count(BlockEvicted), forgotten.count(CheckpointEvicted)) == (2, 2)


def test_nothing_is_forgotten_of_a_request_that_published_nothing() -> None:
    node = FakeNode(policy="every")
    request = admitted(node, PROMPT)
    node.cache.forget_own(request.claim)
    node.prefill(request)
    assert found(node, PROMPT) == (32, 32)
