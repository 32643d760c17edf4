from dataclasses import replace

import pytest

from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ResumeLocally
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.config import ConfigError
from headrace.step_costs import StepCosts
from node_runtime.config import FetchConfig
from node_runtime.fetch_policy import FetchCosts, FetchPolicy

# A block of 4,096 bytes, a state of 744.
LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))
COSTS = FetchCosts(bytes_per_s=1e6, latency_s=0.05)


def steps(token_s: float) -> StepCosts:
    """Costs of steps whose tokens take so long, and nothing else anything."""
    return StepCosts(chunk_s=0.0, token_s=token_s, depth_s=0.0)


def policy(
    fetch_source_tokens: int | None = 320,
    num_tokens: int = 400,
    *,
    costs: FetchCosts = COSTS,
    step_costs: StepCosts | None = None,
    is_scored: bool = False,
    num_prompts: int = 1,
    **config: object,
) -> FetchPolicy:
    return FetchPolicy(
        FetchConfig(**config),
        costs,
        step_costs or steps(1e-3),
        256,
        LAYOUT,
        num_tokens,
        fetch_source_tokens,
        is_scored,
        lambda: num_prompts,
    )


def chosen(made: FetchPolicy, attention: int, state: int) -> HitPolicy:
    return made.hit_policy(PrefixHit(attention, state, state))


def test_what_costs_less_to_fetch_than_to_compute_is_fetched() -> None:
    # 160 tokens: 160 ms to compute; 50 ms, and 10 blocks and a state: 41,704 bytes, 42 ms.
    assert chosen(policy(), 160, 160) == FetchState(320)


def test_what_costs_less_to_compute_is_computed() -> None:
    # 80 tokens: 80 ms to compute; 50 ms, and 5 blocks and a state: 21 ms. With half the speed: 92 ms.
    assert chosen(policy(), 240, 240) == FetchState(320)
    slow = FetchCosts(bytes_per_s=5e5, latency_s=0.05)
    assert isinstance(chosen(policy(costs=slow), 240, 240), ResumeLocally)
    assert chosen(policy(costs=slow, max_time_ratio=1.2), 240, 240) == FetchState(320)


def test_where_other_prompts_wait_a_token_less_to_compute_is_worth_more() -> None:
    # 80 tokens: 80 ms to compute, which each prompt here waits for; 200 ms and 21 ms to fetch, which one does.
    slow = FetchCosts(bytes_per_s=1e6, latency_s=0.2)
    assert isinstance(chosen(policy(costs=slow), 240, 240), ResumeLocally)
    assert isinstance(chosen(policy(costs=slow, num_prompts=2), 240, 240), ResumeLocally)
    assert chosen(policy(costs=slow, num_prompts=3), 240, 240) == FetchState(320)


def test_deep_tokens_are_worth_more() -> None:
    """80 tokens from position 240 on take 40 ms and 22,360 depths of 2 us: 85 ms to compute, 71 ms to fetch."""
    flat = StepCosts(chunk_s=0.0, token_s=5e-4, depth_s=0.0)
    assert isinstance(chosen(policy(step_costs=flat), 240, 240), ResumeLocally)
    assert chosen(policy(step_costs=replace(flat, depth_s=2e-6)), 240, 240) == FetchState(320)


def test_blocks_that_are_here_do_not_move() -> None:
    # 80 tokens to compute: 80 ms. All blocks are here: 50 ms and one state, although the link is slow.
    slow = FetchCosts(bytes_per_s=5e4, latency_s=0.05)
    assert chosen(policy(costs=slow), 320, 240) == FetchState(320)
    assert chosen(policy(costs=slow), 390, 240) == FetchState(320)
    assert isinstance(chosen(policy(costs=slow), 240, 240), ResumeLocally)


def test_few_tokens_are_not_worth_asking_for() -> None:
    free = FetchCosts(bytes_per_s=1e12, latency_s=0.0)
    assert isinstance(chosen(policy(costs=free), 272, 272), ResumeLocally)
    assert chosen(policy(costs=free), 256, 256) == FetchState(320)
    assert chosen(policy(costs=free, min_tokens=48), 272, 272) == FetchState(320)


@pytest.mark.parametrize(
    "made",
    [
        policy(None),
        policy(0),
        policy(330),
        policy(400, 400),
        policy(416, 400),
        policy(is_scored=True),
        policy(enabled=False),
    ],
    ids=["no fetch source", "nothing", "no boundary", "the whole prompt", "more", "scored", "off"],
)
def test_what_cannot_be_fetched_is_computed(made: FetchPolicy) -> None:
    assert made.candidate(PrefixHit(0, 0, 0)) is None
    assert isinstance(chosen(made, 0, 0), ResumeLocally)


def test_a_candidate_need_not_pay() -> None:
    dear = FetchCosts(bytes_per_s=1.0, latency_s=1.0)
    hit = PrefixHit(0, 0, 0)
    assert policy(costs=dear).candidate(hit) == FetchState(320)
    assert isinstance(policy(costs=dear).hit_policy(hit), ResumeLocally)


@pytest.mark.parametrize("change", [{"min_tokens": 0}, {"timeout_s": 0.0}, {"max_time_ratio": -1.0}])
def test_a_bad_setting_is_named(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        FetchConfig(**change)
