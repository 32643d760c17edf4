import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.checkpoints import CHECKPOINT_POLICIES, Boundary, ChunkSpan, PromptFacts, checkpoint_policy
from headrace.cache.errors import UnknownCheckpointPolicy
from headrace.cache.types import PRIMARY


def boundaries(policy: str, span: tuple[int, int], num_tokens: int, **facts) -> tuple[int, ...]:
    prompt = PromptFacts(num_tokens=num_tokens, block_size=16, **facts)
    return tuple(boundary.num_tokens for boundary in named_by(policy, span, prompt))


def named_by(policy: str, span: tuple[int, int], prompt: PromptFacts) -> tuple[Boundary, ...]:
    return checkpoint_policy(policy).prompt_boundaries(ChunkSpan(*span), prompt)


@pytest.mark.parametrize(
    ("policy", "span", "facts", "expected"),
    [
        ("none", (0, 100), {"hints": (32,), "branch_point": 48}, ()),
        ("align", (0, 100), {}, (96,)),
        ("align", (0, 96), {}, (96,)),
        ("align", (96, 100), {}, ()),
        ("align", (90, 100), {}, (96,)),
        ("align", (0, 15), {}, ()),
        ("align", (0, 100), {"hints": (32,), "branch_point": 48}, (48, 96)),
        ("every", (0, 100), {}, (16, 32, 48, 64, 80, 96)),
        ("every", (32, 64), {}, (48, 64)),
        ("every", (33, 63), {}, (48,)),
        ("every", (0, 15), {}, ()),
        ("branch", (0, 100), {}, (96,)),
        ("branch", (0, 64), {}, ()),
        ("branch", (96, 100), {}, ()),
        ("branch", (0, 100), {"hints": (40, 47, 5, 100, 1000), "branch_point": 64}, (32, 64, 96)),
        ("branch", (32, 64), {"hints": (40, 47, 70), "branch_point": 64}, (64,)),
    ],
)
def test_boundaries_of_one_chunk_of_a_prompt_of_100(policy, span, facts, expected) -> None:
    assert boundaries(policy, span, 100, **facts) == expected


@pytest.mark.parametrize(("num_tokens", "last"), [(1, ()), (16, ()), (17, (16,)), (32, (16,)), (33, (32,))])
def test_branch_keeps_the_last_boundary_that_the_same_prompt_can_resume_from(num_tokens, last) -> None:
    assert boundaries("branch", (0, num_tokens), num_tokens) == last


@given(
    st.sampled_from(CHECKPOINT_POLICIES),
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=4),
    st.none() | st.integers(0, 18).map(lambda block: block * 16),
    st.integers(1, 70),
)
def test_chunks_name_ascending_boundaries_within_themselves(policy, num_tokens, hints, branch_point, chunk) -> None:
    for start in range(0, num_tokens, chunk):
        span = (start, min(start + chunk, num_tokens))
        named = boundaries(policy, span, num_tokens, hints=tuple(hints), branch_point=branch_point)
        assert list(named) == sorted(set(named))
        assert all(span[0] < position <= span[1] and position % 16 == 0 for position in named)


@given(st.sampled_from(["none", "every", "branch"]), st.integers(1, 300), st.integers(1, 70))
def test_how_a_prompt_is_cut_into_chunks_changes_nothing_but_align(policy, num_tokens, chunk) -> None:
    cut: list[int] = []
    for start in range(0, num_tokens, chunk):
        cut += boundaries(policy, (start, min(start + chunk, num_tokens)), num_tokens, hints=(50, 77))
    assert tuple(cut) == boundaries(policy, (0, num_tokens), num_tokens, hints=(50, 77))


@pytest.mark.parametrize(
    ("policy", "kept", "superseded"),
    [("none", False, ()), ("align", True, (16, 32)), ("branch", True, (16, 32)), ("every", True, ())],
)
def test_what_a_decode_keeps(policy, kept, superseded) -> None:
    chosen = checkpoint_policy(policy)
    assert chosen.decoded_boundary(48, 16) is kept
    assert not chosen.decoded_boundary(47, 16)
    assert tuple(chosen.superseded((16, 32))) == superseded


def test_the_default_is_branch_and_an_unknown_name_lists_the_known_ones() -> None:
    assert checkpoint_policy().name == "branch"
    assert {checkpoint_policy(name).name for name in CHECKPOINT_POLICIES} == {
        "none",
        "align",
        "every",
        "branch",
    }
    with pytest.raises(UnknownCheckpointPolicy, match=r"'brunch' is unknown: use one of none, align, every, branch"):
        checkpoint_policy("brunch")


def test_branch_keeps_a_grid_whose_every_second_position_goes_first() -> None:
    prompt = PromptFacts(num_tokens=1100, block_size=16, hints=(256,))
    named = checkpoint_policy("branch", checkpoint_grid_tokens=128).prompt_boundaries(ChunkSpan(0, 1100), prompt)
    tiers = {boundary.num_tokens: boundary.tier for boundary in named}
    assert tiers == {128: 0, 256: PRIMARY, 384: 0, 512: 2, 640: 0, 768: 1, 896: 0, 1024: 3, 1088: PRIMARY}


def test_no_grid_position_has_the_primary_tier() -> None:
    prompt = PromptFacts(num_tokens=1 << 20, block_size=16)
    named = checkpoint_policy("branch").prompt_boundaries(ChunkSpan(0, 1 << 20), prompt)
    assert {boundary.tier for boundary in named} == set(range(PRIMARY + 1))
    assert [boundary.num_tokens for boundary in named if boundary.tier == PRIMARY] == [prompt.last_boundary]


def test_a_grid_finer_than_a_block_is_every_boundary() -> None:
    named = checkpoint_policy("branch", checkpoint_grid_tokens=8).prompt_boundaries(
        ChunkSpan(0, 70), PromptFacts(num_tokens=70, block_size=16)
    )
    assert [boundary.num_tokens for boundary in named] == [16, 32, 48, 64]
