from decode_node.config import LocalPrefillConfig
from decode_node.policy import PrefillLocation
from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ReceiveState, ResumeLocally
from headrace.step_costs import StepCosts
from node_runtime.config import FetchConfig
from node_runtime.fetch_policy import FetchCosts, FetchPolicy
from tests.support.router.fake_nodes import LAYOUT


def chosen(num_tokens: int, resumable: int, *, remote: bool = True, max_tokens: int = 64, max_share: float = 0.5):
    location = PrefillLocation(LocalPrefillConfig(max_tokens, max_share), num_tokens, remote)
    return type(location.hit_policy(PrefixHit(resumable, resumable, resumable)))


def test_without_a_prefill_node_everything_is_local() -> None:
    assert chosen(5000, 0, remote=False) is ResumeLocally


def test_a_short_rest_after_an_own_checkpoint_is_prefilled_locally() -> None:
    assert chosen(200, 160) is ResumeLocally
    assert chosen(224, 160) is ResumeLocally
    assert chosen(225, 160) is ReceiveState


def test_a_new_prompt_goes_to_the_prefill_node_however_short() -> None:
    assert chosen(5, 0) is ReceiveState


def test_a_rest_that_is_most_of_the_prompt_goes_to_the_prefill_node() -> None:
    assert chosen(40, 16) is ReceiveState
    assert chosen(40, 16, max_share=0.6) is ResumeLocally


def test_a_prompt_to_be_scored_goes_to_the_prefill_node_however_much_is_cached() -> None:
    location = PrefillLocation(LocalPrefillConfig(), 100, may_prefill_remotely=True, is_scored=True)
    assert isinstance(location.hit_policy(PrefixHit(96, 96, 96)), ReceiveState)


def test_zero_turns_local_prefill_off() -> None:
    assert chosen(161, 160, max_tokens=0) is ReceiveState


def test_a_node_that_must_compute_fetches_what_pays() -> None:
    def fetched(source_tokens: int | None, *, remote: bool = False) -> type[HitPolicy]:
        fetch = FetchPolicy(
            FetchConfig(),
            FetchCosts(),
            StepCosts(token_s=1e-3),
            1024,
            LAYOUT,
            num_tokens=2000,
            fetch_source_tokens=source_tokens,
        )
        location = PrefillLocation(LocalPrefillConfig(), 2000, remote, fetch=fetch)
        return type(location.hit_policy(PrefixHit(64, 64, 64)))

    assert fetched(1920) is FetchState
    assert fetched(112) is ResumeLocally, "less than min_tokens beyond its own checkpoint"
    assert fetched(None) is ResumeLocally
    assert fetched(1920, remote=True) is ReceiveState
