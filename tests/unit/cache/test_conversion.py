"""Two nodes whose blocks or states differ: what is converted, and where both sides' blocks end."""

from dataclasses import replace

import pytest

from headrace.cache.conversion import BlockConversion, conversion_refusal, usual_wire_layouts
from headrace.cache.hashing import PrefixHasher, prefix_keys
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup

LAYOUT = CacheLayout("f", "bfloat16", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))
TOKENS = list(range(100))


def test_layouts_name_the_first_difference_with_both_values() -> None:
    assert LAYOUT.mismatch(LAYOUT) is None
    assert LAYOUT.mismatch(replace(LAYOUT, block_size=32)) == "block_size 16 != 32"
    window_only = StateGroup(3, (10, 3))
    assert LAYOUT.mismatch(replace(LAYOUT, state_groups=(window_only,))) == "state group 0: rec_shape (2, 4, 4) != (0,)"
    two = replace(LAYOUT, state_groups=(*LAYOUT.state_groups, window_only))
    assert LAYOUT.mismatch(two) == "1 state groups != 2"
    assert two.mismatch(replace(two, state_groups=(two.state_groups[0], StateGroup(4, (10, 3))))) == (
        "state group 1: num_layers 3 != 4"
    )
    older = replace(LAYOUT, attention_groups=(), state_groups=(), version=1)
    assert LAYOUT.mismatch(older) == "version 2 != 1", "a release whose groups this one cannot read"


def test_block_sizes_and_state_dtypes_are_converted_and_nothing_else() -> None:
    assert conversion_refusal(LAYOUT, replace(LAYOUT, block_size=24, state_dtype="float16")) is None
    assert (
        conversion_refusal(LAYOUT, replace(LAYOUT, block_size=24, attention_groups=(AttentionGroup(2, 2, 4),)))
        == "attention group 0: head_dim 8 != 4"
    )
    assert conversion_refusal(LAYOUT, replace(LAYOUT, dtype="float32")) == "dtype bfloat16 != float32"


@pytest.mark.parametrize(
    ("own", "peer", "row", "boundary"), [(16, 16, 16, 16), (16, 32, 16, 32), (8, 24, 8, 24), (16, 24, 8, 48)]
)
def test_rows_divide_both_block_sizes_and_boundaries_end_blocks_of_both(own: int, peer: int, row: int, boundary: int):
    conversion = BlockConversion(own, peer)
    assert (conversion.row_tokens, conversion.boundary_tokens) == (row, boundary)
    assert conversion.is_identity is (own == peer)


def test_the_own_blocks_of_a_message_cover_its_tokens_and_end_with_the_prompt() -> None:
    small_to_large = BlockConversion(16, 24)
    assert small_to_large.own_blocks(1, 2, num_held=10) == range(1, 5), "tokens 24 to 72"
    assert small_to_large.own_blocks(1, 2, num_held=3) == range(1, 3), "the last block has fewer tokens than fit"
    assert BlockConversion(16, 16).own_blocks(2, 3, num_held=5) == range(2, 5)


@pytest.mark.parametrize("peer_size", [16, 32, 24])
def test_the_peer_knows_the_prefix_by_keys_of_its_own_blocks(peer_size: int) -> None:
    own = PrefixHasher(16, b"salt")
    own.extend(TOKENS)
    conversion = BlockConversion(16, peer_size)
    num_tokens = conversion.boundary_tokens
    expected = prefix_keys(TOKENS, peer_size, b"salt")[num_tokens // peer_size - 1]
    assert conversion.peer_key(own, TOKENS, num_tokens, b"salt") == expected


def test_kernels_are_compiled_for_every_state_format_and_the_usual_block_sizes() -> None:
    states, blocks = usual_wire_layouts(replace(LAYOUT, block_size=24))
    assert {layout.state_dtype for layout in states} == {"float32", "bfloat16", "float16", "int8", "fp8"}
    assert [layout.block_size for layout in blocks] == [8, 16, 24, 32, 64]
