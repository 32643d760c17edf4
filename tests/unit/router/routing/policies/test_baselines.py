"""The baselines' formulas, on cases computed by hand."""

import pytest

from headrace.cache.hits import PrefixHit
from headrace.config import ConfigError
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate, Load
from router.routing.plan import Policy, RoutedRequest
from router.routing.policies.dynamo import TUNED_PREFILL_LOAD_SCALE, Dynamo
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.llm_d import LlmD
from tests.support.router.candidates import candidate, linked

REQUEST = RoutedRequest(number=0, num_tokens=1600, answer_tokens=100)  # 100 blocks


def prefill_node(policy: Policy, *nodes: Candidate) -> str:
    plan = policy.choose(REQUEST, linked(*nodes))
    assert plan is not None
    return plan.prefill


def decode_node(policy: Policy, *nodes: Candidate) -> str | None:
    plan = policy.choose(REQUEST, linked(candidate("p0", Role.PREFILL), *nodes))
    assert plan is not None
    return plan.decode


def test_least_loaded_counts_waiting_and_decoding_tokens_alike() -> None:
    busy = candidate("a", load=Load(waiting_tokens=300, context_tokens=400))
    assert prefill_node(LeastLoaded(), busy, candidate("b", load=Load(context_tokens=699))) == "b"
    assert prefill_node(LeastLoaded(), busy, candidate("b", load=Load(waiting_tokens=701))) == "a"


def test_dynamo_weighs_a_cached_block_like_a_block_that_decodes() -> None:
    # 40 of 100 blocks cached: 60 + 100 = 160, and as many active blocks more; nothing cached: 100 + 100 = 200
    idle = candidate("b")
    assert prefill_node(Dynamo(), candidate("a", hit=640, load=Load(context_tokens=39 * 16)), idle) == "a"
    assert prefill_node(Dynamo(), candidate("a", hit=640, load=Load(context_tokens=41 * 16)), idle) == "b"


def test_dynamo_counts_a_waiting_block_as_one_to_compute_and_one_that_is_held() -> None:
    idle = candidate("b")
    assert prefill_node(Dynamo(), candidate("a", hit=640, load=Load(waiting_tokens=19 * 16)), idle) == "a"
    assert prefill_node(Dynamo(), candidate("a", hit=640, load=Load(waiting_tokens=21 * 16)), idle) == "b"


def test_tuned_dynamo_takes_more_load_for_the_same_hit() -> None:
    tuned = Dynamo(prefill_load_scale=TUNED_PREFILL_LOAD_SCALE)
    busy = candidate("a", hit=640, load=Load(context_tokens=32 * 39 * 16))
    assert prefill_node(tuned, busy, candidate("b")) == "a"
    assert prefill_node(Dynamo(), busy, candidate("b")) == "b"


def test_dynamo_counts_attention_blocks_that_nothing_can_resume_from() -> None:
    blocks_alone = candidate("a", hit=PrefixHit(attention_tokens=800, state_tokens=0, resumable_tokens=0))
    assert prefill_node(Dynamo(), blocks_alone, candidate("b", hit=640)) == "a"


def test_dynamo_ignores_hits_of_decode_nodes_behind_a_prefill_node() -> None:
    held = candidate("d0", Role.DECODE, hit=1600, load=Load(context_tokens=16))
    assert decode_node(Dynamo(), held, candidate("d1", Role.DECODE)) == "d1"


def test_dynamo_weighs_the_requests_of_a_decode_node_if_asked() -> None:
    many = candidate("d0", Role.DECODE, load=Load(num_decoding=8, context_tokens=800))
    long = candidate("d1", Role.DECODE, load=Load(num_decoding=1, context_tokens=1600))
    assert decode_node(Dynamo(), many, long) == "d0"
    assert decode_node(Dynamo(decode_active_request_weight=64), many, long) == "d1"


def test_llm_d_gives_up_a_hit_for_a_shorter_queue() -> None:
    # a: 3 * 0.5 + 2 * 0 + 2 * 1 = 3.5 (its queue the longest); b: 0 + 2 * 1 + 2 * 1 = 4
    free = 10**9
    queued = Load(waiting_tokens=160, free_tokens=free)
    idle = candidate("b", load=Load(free_tokens=free))
    assert prefill_node(LlmD(), candidate("a", hit=800, load=queued), idle) == "b"
    assert prefill_node(LlmD(), candidate("a", hit=1120, load=queued), idle) == "a"  # 3 * 0.7: 4.1


def test_llm_d_gives_up_a_hit_for_free_blocks() -> None:
    # a: 3 * 0.25 + 2 + 2 * 0.5 = 3.75; b: 0 + 2 + 2 * 1 = 4
    half = Load(context_tokens=50_000, free_tokens=50_000)
    assert prefill_node(LlmD(), candidate("a", hit=400, load=half), candidate("b")) == "b"
    assert prefill_node(LlmD(), candidate("a", hit=640, load=half), candidate("b")) == "a"  # 3 * 0.4: 4.2


def test_llm_d_ignores_hits_of_decode_nodes() -> None:
    held = candidate("d0", Role.DECODE, hit=1600, load=Load(context_tokens=16, free_tokens=1000))
    assert decode_node(LlmD(), held, candidate("d1", Role.DECODE)) == "d1"


def test_weights_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_load_scale -1"):
        Dynamo(prefill_load_scale=-1)
    with pytest.raises(ConfigError, match="queue_weight -2"):
        LlmD(queue_weight=-2)
