"""The choice of a decode node to fetch from."""

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit
from headrace.request import Request, Sampling
from headrace.wire.messages import Role
from router.cluster.fetch_sources import LONG_PROMPT_TOKENS, PromptKeys, choose_fetch_source
from tests.support.router.fake_nodes import fetch_source, node_info

D0, D1 = node_info("d0", Role.DECODE), node_info("d1", Role.DECODE)


def hit(attention_tokens: int, state_tokens: int) -> PrefixHit:
    return PrefixHit(attention_tokens, state_tokens, resumable_tokens=state_tokens)


def test_the_deepest_checkpoint_counts_not_the_most_blocks() -> None:
    assert choose_fetch_source([(D0, hit(96, 32)), (D1, hit(64, 64))], hit(32, 32)) == fetch_source("d1", 64)


def test_no_source_if_none_holds_more_than_the_prefill_node_can_resume_from() -> None:
    assert choose_fetch_source([(D0, hit(96, 32))], hit(32, 32)) is None
    assert choose_fetch_source([(D0, hit(96, 48))], hit(64, 32)) == fetch_source("d0", 48)
    assert choose_fetch_source([(D0, hit(96, 0))], hit(0, 0)) is None
    assert choose_fetch_source([], hit(0, 0)) is None


def test_an_unknown_prefill_node_is_assumed_to_hold_nothing() -> None:
    assert choose_fetch_source([(D0, hit(16, 16))], None) == fetch_source("d0", 16)
    assert choose_fetch_source([(D0, hit(16, 0))], None) is None


async def test_keys_are_those_of_the_tokens_so_far_and_hashed_once() -> None:
    keys = PromptKeys()
    for length in (40, LONG_PROMPT_TOKENS + 5):
        request = Request("r", tuple(range(length)), 40, Sampling(max_tokens=9, seed=0), salt=b"tenant")
        first = (await keys.of(request, {16}))[16]
        assert first == prefix_keys(range(length), 16, b"tenant")
        both = await keys.of(request, {16, 32})
        assert both[16] is first
        assert both[32] == prefix_keys(range(length), 32, b"tenant")
