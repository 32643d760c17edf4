"""Triton decode attention against float64, on a GPU or in the interpreter."""

import pytest
import torch

from headrace.kernels.attention.decode import DecodeTile, PagedContexts, num_splits, paged_decode_triton
from tests.kernels.attention.paged import BLOCK, DEVICE, Paged, needs_gpu
from tests.kernels.naive import NAN


def check_decode(
    lens: list[int],
    H: int,
    KV: int,
    D: int,
    dtype: torch.dtype,
    splits: int | None,
    has_gate: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    paged = Paged(lens, H, KV, D, dtype)
    q = paged.queries(len(lens))
    reserved = [[*blocks, paged.free[0]] for blocks in paged.blocks]  # blocks behind the context are not read
    contexts = PagedContexts.build(lens, reserved, BLOCK, DEVICE)
    wide = torch.full((len(lens), contexts.table_NM.shape[1] + 5), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, :-5] = contexts.table_NM  # a captured graph's table is wider than any context
    contexts = PagedContexts(contexts.lens_N, wide)
    gate = paged.queries(len(lens)) if has_gate else None
    out = paged_decode_triton(q, paged.k_pool, paged.v_pool, D**-0.5, contexts, gate, tile, splits)
    if gate is not None:  # open again, to compare; what a closed gate holds back is not far from rounding
        out = (out.double() / gate.double().sigmoid()).to(dtype)
    for i, length in enumerate(lens):
        if length:
            paged.check(out[i : i + 1], q[i : i + 1], i, D**-0.5)
        else:
            assert not out[i].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("lens", [[1], [129], [5, 300, 0, 64]], ids=str)
def test_decode_sees_exactly_its_own_context(lens: list[int], splits: int, dtype: torch.dtype):
    check_decode(lens, 6, 2, 16, dtype, splits)


def test_decode_merges_more_splits_than_at_once():
    tile = DecodeTile(keys=16, split_keys=16, num_warps=4, num_stages=1)
    check_decode([16 * 40], 1, 1, 16, torch.float32, 64, tile=tile)


@pytest.mark.parametrize(("splits", "D"), [(1, 16), (4, 16), (1, 48), (4, 10)])
def test_decode_closes_its_output_gate_of_heads_of_any_size(splits: int, D: int):
    check_decode([5, 300, 0, 64], 6, 2, D, torch.float32, splits, has_gate=True)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_skips_the_first_token(splits: int):
    lens = [5, 300, 0, 2, 17]
    paged = Paged(lens, 6, 2, 16)
    for length, blocks in zip(lens, paged.blocks, strict=True):
        if length:
            paged.k_pool[blocks[0], 0] = paged.v_pool[blocks[0], 0] = NAN
    paged.k, paged.v = ([own[1:] for own in owned] for owned in (paged.k, paged.v))
    q, contexts = paged.queries(len(lens)), PagedContexts.build(lens, paged.blocks, BLOCK, DEVICE)
    out = paged_decode_triton(q, paged.k_pool, paged.v_pool, 0.25, contexts, splits=splits, skip_first=True)
    for i, length in enumerate(lens):
        if length:
            paged.check(out[i : i + 1], q[i : i + 1], i, 0.25)
        else:
            assert not out[i].any()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256), (6, 2, 80), (20, 1, 96)])
@pytest.mark.parametrize("lens", [[8192], [1, 63, 64, 65, 5000, 127, 128, 129], [700] * 80], ids=len)
def test_decode_of_real_shapes(lens: list[int], H: int, KV: int, D: int, dtype: torch.dtype):
    check_decode(lens, H, KV, D, dtype, None)


def test_an_empty_decode_is_none():
    paged = Paged([1], 2, 1, 16)
    contexts = PagedContexts.build([], [], BLOCK, DEVICE)
    assert len(paged_decode_triton(paged.queries(0), paged.k_pool, paged.v_pool, 1.0, contexts)) == 0


def test_splits_follow_from_shapes():
    assert num_splits(1, 8, 131072, 128) == 64
    assert num_splits(64, 8, 8192, 128) == 4
    assert num_splits(256, 8, 131072, 128) == 4
    assert num_splits(256, 8, 128, 128) == 1
    assert num_splits(1, 8, 256, 128) == 2


@needs_gpu
def test_a_captured_decode_replays_with_other_contexts():
    paged = Paged([900, 40], 4, 2, 64, torch.bfloat16)
    q = paged.queries(2)
    full = PagedContexts.build([900, 40], paged.blocks, BLOCK, DEVICE)
    static = PagedContexts(torch.ones_like(full.lens_N), full.table_NM)
    run = lambda: paged_decode_triton(q, paged.k_pool, paged.v_pool, 0.125, static)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    static.lens_N.copy_(full.lens_N)
    graph.replay()
    for i in range(2):
        paged.check(out[i : i + 1], q[i : i + 1], i, 0.125)


def test_heads_that_do_not_lie_side_by_side_are_refused():
    paged = Paged([4], 2, 1, 16)
    contexts = PagedContexts.build([4], paged.blocks, BLOCK, DEVICE)
    q = paged.random(1, 2, 32)[..., ::2]
    with pytest.raises(ValueError, match="side by side"):
        paged_decode_triton(q, paged.k_pool, paged.v_pool, 1.0, contexts)
    with pytest.raises(ValueError, match="head dim 272: attention on a GPU takes at most 256"):
        paged_decode_triton(paged.random(1, 2, 272), paged.k_pool, paged.v_pool, 1.0, contexts)
