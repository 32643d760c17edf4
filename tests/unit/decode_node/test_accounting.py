"""What a decode node counts: hits of remote requests are bytes that no prefill node had to send."""

from decode_node.accounting import HitAccounting
from headrace.cache.hits import PrefixHit
from headrace.engine.sequence import Admitted
from tests.support.router.fake_nodes import LAYOUT

BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # layers, keys and values, tokens, heads, width, float32


def test_the_attention_hit_of_a_remote_request_is_not_moved() -> None:
    accounting = HitAccounting(LAYOUT)
    accounting.admitted(Admitted(PrefixHit(64, 16, 16), reused_tokens=64, state_arrives=True), computes_here=False)
    accounting.admitted(Admitted(PrefixHit(0, 0, 0), reused_tokens=0, state_arrives=True), computes_here=False)
    assert accounting.counters() == {
        "remote_requests": 2,
        "local_requests": 0,
        "remote_hit_tokens": 64,
        "bytes_not_moved": 4 * BLOCK_BYTES,
    }


def test_a_local_request_would_not_have_moved_anything() -> None:
    accounting = HitAccounting(LAYOUT)
    accounting.admitted(Admitted(PrefixHit(64, 32, 32), reused_tokens=32, state_arrives=False), computes_here=True)
    assert accounting.counters() == {
        "remote_requests": 0,
        "local_requests": 1,
        "remote_hit_tokens": 0,
        "bytes_not_moved": 0,
    }
