"""Equal shares of a decode's contexts, on a GPU or in the interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.attention.decode_shares import TILES_AT_ONCE, num_programs, program_of, share_of, shares
from tests.kernels.attention.paged import DEVICE

KEYS = tl.constexpr(16)


@triton.jit
def _share_kernel(lens_ptr, out_ptr, programs, least_steps, num_tiles, HKV: tl.constexpr):
    found = share_of(lens_ptr, tl.program_id(0), programs, least_steps, num_tiles, HKV, 1, 1, KEYS)
    for i in tl.static_range(5):
        tl.store(out_ptr + tl.program_id(0) * 5 + i, found[i])


@triton.jit
def _program_kernel(out_ptr, total, programs, least_steps):
    share, num_larger = shares(total, programs, least_steps)
    tl.store(out_ptr + tl.program_id(0), program_of(tl.program_id(0), share, num_larger))


def shares_of(lens: list[int], programs: int, heads: int, least_steps: int) -> list[list[int]]:
    """What each program's `share_of` returns."""
    lens_N = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    out = torch.full((programs, 5), -1, dtype=torch.int32, device=DEVICE)
    _share_kernel[(programs,)](lens_N, out, programs, least_steps, len(lens), HKV=heads)
    return out.tolist()


@pytest.mark.parametrize("least_steps", [1, 4])
@pytest.mark.parametrize("programs", [1, 5, 40])
@pytest.mark.parametrize(
    "lens",
    [[1], [0, 33, 0, 0, 1, 160, 16, 0, 15, 0], [0, 0], [16 * (i % 5) for i in range(TILES_AT_ONCE.value + 9)]],
    ids=len,
)
def test_shares_are_equal_to_within_a_step_and_cover_all(lens: list[int], programs: int, least_steps: int):
    heads = 3
    steps = [-(-length // KEYS.value) * heads for length in lens]
    owners = [tile for tile, number in enumerate(steps) for _ in range(number)]
    found = shares_of(lens, programs, heads, least_steps)
    busy = [each for each in found if each[0] < each[1]]
    assert [step for begin, end, *_ in busy for step in range(begin, end)] == list(range(len(owners)))
    sizes = [end - begin for begin, end, *_ in busy]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert len(busy) == programs or min(sizes, default=least_steps) >= min(least_steps, len(owners))
    for begin, _, tile, tile_begin, tile_end in busy:
        assert (tile, tile_begin, tile_end) == (owners[begin], sum(steps[:tile]), sum(steps[: tile + 1]))


@pytest.mark.parametrize(
    ("total", "programs", "least_steps"), [(1, 1, 1), (20, 6, 1), (18, 6, 1), (20, 16, 2), (3, 8, 4)]
)
def test_each_step_is_found_in_the_program_that_computes_it(total: int, programs: int, least_steps: int):
    out = torch.full((total,), -1, dtype=torch.int32, device=DEVICE)
    _program_kernel[(total,)](out, total, programs, least_steps)
    found = shares_of([total * KEYS.value], programs, 1, least_steps)
    assert out.tolist() == [program for program, (begin, end, *_) in enumerate(found) for _ in range(begin, end)]


def test_the_number_of_programs_follows_from_shapes():
    assert num_programs(528, 64 * 8, 8192, 128) == 528
    assert num_programs(264, 8, 131072, 128) == 264
    assert num_programs(264, 8, 256, 128) == 16
    assert num_programs(264, 2, 131072, 128) == 128  # merging more pieces takes longer
    assert num_programs(264, 2, 1, 128) == 2
