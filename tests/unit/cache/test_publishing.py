"""The publisher's calls around a step, on a node without tensors."""

from headrace.cache.checkpoints import ChunkSpan, checkpoint_policy
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.types import PRIMARY
from tests.support.cache.cache_node import FakeNode, Request

SIZE = 16


def admitted(node: FakeNode, num_tokens: int, kind: int = 1, **options) -> Request:
    request = node.admit([kind] * num_tokens, **options)
    assert request is not None
    return request


def prepared(node: FakeNode, *spans: tuple[Request, int, int]) -> list[ScheduledChunk[Request]]:
    chunks = [ScheduledChunk(request, ChunkSpan(start, end)) for request, start, end in spans]
    Publisher(node.cache, node.policy).prepare(chunks)
    return chunks


def num_free_slots(cache: PrefixCache) -> int:
    return cache.stats().slots.free


def test_states_inside_a_chunk_get_slots_and_the_one_at_its_end_is_donated() -> None:
    node = FakeNode(policy="every")
    (chunk,) = prepared(node, (admitted(node, 100), 0, 48))
    assert [boundary.num_tokens for boundary, _ in chunk.emit] == [16, 32]
    assert chunk.at_end is not None and chunk.at_end.num_tokens == 48
    assert node.cache.stats().slots.in_use == 3  # the running state, and two to be emitted


def test_higher_tiers_get_their_slots_first_over_all_chunks_of_a_step() -> None:
    node = FakeNode(policy="branch", num_slots=4, checkpoint_grid_tokens=SIZE)
    first, second = admitted(node, 100, 1), admitted(node, 100, 2)
    chunks = prepared(node, (first, 0, 100), (second, 0, 100))
    assert [[(boundary.num_tokens, boundary.tier) for boundary, _ in chunk.emit] for chunk in chunks] == [
        [(96, PRIMARY)],
        [(96, PRIMARY)],
    ]
    assert num_free_slots(node.cache) == 0


def test_a_decode_reserves_nothing() -> None:
    node = FakeNode(policy="every")
    request = admitted(node, 16)
    node.prefill(request)
    before = node.cache.stats()
    (chunk,) = prepared(node, (request, 16, 17))
    assert (chunk.emit, chunk.at_end) == ([], None)
    assert node.cache.stats() == before


def test_checkpoints_of_the_prompt_and_of_the_answer_are_recorded_apart() -> None:
    node = FakeNode(policy="every")
    request = node.serve([1] * 33, answer=[2] * 16)
    assert request.prompt_checkpoint_positions == [16, 32]
    assert [checkpoint.num_tokens for checkpoint in request.answer_checkpoints] == [48]


def test_a_received_state_becomes_a_checkpoint_only_if_the_policy_keeps_decoded_ones() -> None:
    for policy, expected in (("none", []), ("branch", [32])):
        node = FakeNode(policy=policy)
        request = admitted(node, 40)
        request.num_computed = 32
        publisher = Publisher(node.cache, checkpoint_policy(policy))
        publisher.publish_blocks(request)
        publisher.keep_received(request)
        assert request.prompt_checkpoint_positions == expected
        node.cache.check()


def test_an_answer_whose_blocks_were_forgotten_with_a_copied_one_is_found_again_from_its_next_token_on() -> None:
    node = FakeNode(num_blocks=12)
    first, second = admitted(node, 64), admitted(node, 64)
    node.prefill(first)
    node.prefill(second)  # its blocks are copies, and those of its answer hang below the first one's
    node.decode(second, [2] * 20)
    node.finish(first)
    evicting = node.admit([3] * (node.cache.stats().blocks.free + 1) * SIZE)
    assert evicting is not None
    node.finish(evicting)
    assert node.match(second.tokens).attention_tokens == 48
    node.decode_token(second, 2)
    assert second.num_computed % SIZE, "no block was filled"
    assert node.match(second.tokens).attention_tokens == 80
    node.finish(second)
    assert node.match(second.tokens).attention_tokens == 80
