import pytest

from headrace.cache.hits import FetchState, PrefixHit, ReceiveState, ResumeLocally

BOTH = PrefixHit(attention_tokens=64, state_tokens=32, resumable_tokens=32)
NO_STATE = PrefixHit(attention_tokens=64, state_tokens=0, resumable_tokens=0)
EQUAL = PrefixHit(attention_tokens=48, state_tokens=48, resumable_tokens=48)


@pytest.mark.parametrize(
    ("hit", "reusable", "resume", "branch_point"),
    [(BOTH, 32, 32, 64), (NO_STATE, 0, None, 64), (EQUAL, 48, 48, None)],
)
def test_a_local_prefill_reuses_what_both_groups_have(hit, reusable, resume, branch_point) -> None:
    policy = ResumeLocally()
    assert policy.reusable_tokens(hit) == reusable
    assert policy.resume_tokens(hit) == resume
    assert policy.branch_point(hit) == branch_point


@pytest.mark.parametrize("hit", [BOTH, NO_STATE, EQUAL])
def test_a_remote_prefill_reuses_the_attention_hit_and_reads_no_checkpoint(hit: PrefixHit) -> None:
    policy = ReceiveState()
    assert policy.reusable_tokens(hit) == hit.attention_tokens
    assert policy.resume_tokens(hit) is None
    assert policy.branch_point(hit) is None


@pytest.mark.parametrize(("num_tokens", "local"), [(0, 0), (1, 0), (64, 63), (65, 64)])
def test_only_a_local_prefill_must_compute_a_token(num_tokens: int, local: int) -> None:
    assert ResumeLocally().reuse_limit(num_tokens) == local
    assert ReceiveState().reuse_limit(num_tokens) == num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "reusable", "branch_point"),
    [(80, 64, None), (64, 64, None), (48, 48, 64)],
)
def test_a_fetch_reuses_attention_up_to_the_state_that_arrives(num_tokens, reusable, branch_point) -> None:
    policy = FetchState(num_tokens)
    assert policy.state_arrives
    assert policy.reusable_tokens(BOTH) == reusable
    assert policy.resume_tokens(BOTH) is None
    assert policy.branch_point(BOTH) == branch_point
    assert policy.reuse_limit(100) == 99
