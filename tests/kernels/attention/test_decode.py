"""Triton decode attention against float64, on a GPU or in the interpreter."""

import pytest
import torch

from headrace.kernels.attention.decode import (
    DecodeTile,
    PagedContexts,
    paged_decode_triton,
    tokens_at_once,
)
from tests.kernels.attention.paged import BLOCK, BOUND, DEVICE, Paged, needs_gpu
from tests.kernels.naive import NAN, naive_attention

STEP = DecodeTile(keys=16, least_steps=1, num_warps=4, num_stages=1)


def check_decode(
    lens: list[int],
    H: int,
    KV: int,
    D: int,
    dtype: torch.dtype,
    programs: int | None,
    has_gate: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    paged = Paged(lens, H, KV, D, dtype)
    q = paged.queries(len(lens))
    reserved = [[*blocks, paged.free[0]] for blocks in paged.blocks]  # blocks behind the context are not read
    contexts = PagedContexts.build(lens, reserved, BLOCK, DEVICE)
    wide = torch.full((len(lens), contexts.table_NM.shape[1] + 5), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, :-5] = contexts.table_NM  # a captured graph's table is wider than any context
    contexts = PagedContexts(contexts.lens_R, wide)
    gate = paged.queries(len(lens)) if has_gate else None
    out = paged_decode_triton(q, paged.k_pool, paged.v_pool, D**-0.5, contexts, gate, tile, programs)
    if gate is not None:  # open again, to compare; what a closed gate holds back is not far from rounding
        out = (out.double() / gate.double().sigmoid()).to(dtype)
    for i, length in enumerate(lens):
        if length:
            paged.check(out[i : i + 1], q[i : i + 1], i, D**-0.5)
        else:
            assert not out[i].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("lens", [[1], [129], [5, 300, 0, 64]], ids=str)
def test_decode_sees_exactly_its_own_context(lens: list[int], programs: int, dtype: torch.dtype):
    check_decode(lens, 6, 2, 16, dtype, programs)


def test_decode_merges_more_pieces_than_at_once():
    check_decode([16 * 40], 1, 1, 16, torch.float32, 64, tile=STEP)
    check_decode([16 * 40, 1, 1, 1], 4, 4, 16, torch.float32, 64, tile=STEP)  # where items have few on average


@pytest.mark.parametrize("programs", [1, 3, 7, 64, 1000])
def test_shares_begin_and_end_anywhere(programs: int):
    """In the middle of a context, between two KV heads of one, between contexts, behind padding."""
    check_decode([0, 33, 0, 0, 1, 64, 16, 0, 130, 15, 0], 6, 3, 16, torch.float32, programs, tile=STEP)


@pytest.mark.parametrize("long_at", [255, 256])
def test_contexts_of_more_sequences_than_are_added_up_at_once(long_at: int):
    lens = [number % 3 for number in range(300)]
    lens[long_at] = 200
    check_decode(lens, 2, 2, 16, torch.float32, 8, tile=STEP)


@pytest.mark.parametrize(("programs", "D"), [(1, 16), (4, 16), (1, 48), (4, 10)])
def test_decode_closes_its_output_gate_of_heads_of_any_size(programs: int, D: int):
    check_decode([5, 300, 0, 64], 6, 2, D, torch.float32, programs, has_gate=True)


@pytest.mark.parametrize(("H", "D"), [(6, 16), (8, 16), (8, 10), (5, 48)])
@pytest.mark.parametrize("programs", [4, 16, 40])
@pytest.mark.parametrize("T", [1, 4])
def test_heads_of_any_number_are_merged_from_few_and_many_pieces(T: int, programs: int, H: int, D: int):
    """With a gate."""
    rows = [drafts(126, T, T), drafts(1300, 1, T), drafts(1343, T, T), drafts(0, 0, T), drafts(14, T, T)]
    check_rows(rows, H, 1, D, programs=programs, has_gate=True)


@pytest.mark.parametrize("programs", [1, 4])
def test_decode_skips_the_first_token(programs: int):
    lens = [5, 300, 0, 2, 17]
    paged = Paged(lens, 6, 2, 16)
    for length, blocks in zip(lens, paged.blocks, strict=True):
        if length:
            paged.k_pool[blocks[0], 0] = paged.v_pool[blocks[0], 0] = NAN
    paged.k, paged.v = ([own[1:] for own in owned] for owned in (paged.k, paged.v))
    q, contexts = paged.queries(len(lens)), PagedContexts.build(lens, paged.blocks, BLOCK, DEVICE)
    out = paged_decode_triton(q, paged.k_pool, paged.v_pool, 0.25, contexts, programs=programs, skip_first=True)
    for i, length in enumerate(lens):
        if length:
            paged.check(out[i : i + 1], q[i : i + 1], i, 0.25)
        else:
            assert not out[i].any()


def check_rows(
    rows: list[list[int]],
    H: int,
    KV: int,
    D: int,
    dtype: torch.dtype = torch.float32,
    programs: int | None = None,
    skip_first: bool = False,
    has_gate: bool = False,
) -> None:
    """Sequences of as many rows each, given by the rows' contexts; 0: a padding row."""
    ends = [max(lens) for lens in rows]
    paged = Paged(ends, H, KV, D, dtype)
    one = PagedContexts.build(ends, paged.blocks, BLOCK, DEVICE)
    table = torch.full((len(rows), one.table_NM.shape[1] + 5), 2**30, dtype=torch.int32, device=DEVICE)
    table[:, :-5] = one.table_NM
    flat = [length for lens in rows for length in lens]
    contexts = PagedContexts(torch.tensor(flat, dtype=torch.int32, device=DEVICE), table)
    q = paged.queries(len(flat))
    gate = paged.queries(len(flat)) if has_gate else None
    out = paged_decode_triton(
        q, paged.k_pool, paged.v_pool, D**-0.5, contexts, gate, programs=programs, skip_first=skip_first
    )
    if gate is not None:
        out = (out.double() / gate.double().sigmoid()).to(dtype)
    first = int(skip_first)
    for i, length in enumerate(flat):
        if length:
            k, v = (own[i // len(rows[0])][first:length] for own in (paged.k, paged.v))
            expected = naive_attention(q[i : i + 1], k, v, D**-0.5)
            torch.testing.assert_close(out[i : i + 1].double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])
        else:
            assert not out[i].any()


def drafts(start: int, num_tokens: int, T: int) -> list[int]:
    """Contexts of T rows: tokens behind `start` others, each of which sees one more, and padding."""
    return [start + 1 + i for i in range(num_tokens)] + [0] * (T - num_tokens)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("T", [2, 3, 4, 8])
def test_each_row_of_a_sequence_sees_the_tokens_up_to_its_own(T: int, programs: int):
    """Rows end in different blocks, pieces and steps of keys; one sequence has no drafts, one is padding."""
    full = [drafts(start, T, T) for start in (0, 15, 126, 127, 255, 300)]
    check_rows([*full, drafts(200, 1, T), drafts(0, 0, T)], 6, 2, 16, programs=programs)


@pytest.mark.parametrize(("H", "KV", "D"), [(4, 1, 48), (3, 3, 10), (16, 2, 16)])
def test_rows_of_heads_of_any_size_and_number(H: int, KV: int, D: int):
    check_rows([drafts(126, 4, 4), drafts(14, 2, 4), drafts(0, 0, 4)], H, KV, D, programs=4, has_gate=True)


def test_rows_in_bfloat16():
    check_rows([drafts(126, 4, 4), drafts(14, 2, 4)], 4, 1, 16, torch.bfloat16, programs=4)


def test_rows_skip_the_first_token():
    check_rows([drafts(1, 4, 4), drafts(126, 3, 4)], 4, 1, 16, programs=4, skip_first=True)


def test_more_rows_than_a_program_takes_are_cut_into_parts_of_about_one_size():
    assert [tokens_at_once(rows, 4) for rows in (1, 4, 16, 17, 20)] == [1, 4, 16, 9, 10]
    assert tokens_at_once(5, 100) == 1
    check_rows([drafts(120, 17, 17), drafts(3, 12, 17), drafts(40, 1, 17)], 4, 1, 16, programs=4)


def test_rows_that_no_sequences_share_evenly_are_refused():
    paged = Paged([4, 4], 2, 1, 16)
    contexts = PagedContexts.build([4, 4], paged.blocks, BLOCK, DEVICE)
    uneven = PagedContexts(torch.ones(3, dtype=torch.int32, device=DEVICE), contexts.table_NM)
    with pytest.raises(ValueError, match="3 rows are not as many for each of 2 sequences"):
        paged_decode_triton(paged.queries(3), paged.k_pool, paged.v_pool, 1.0, uneven)
    with pytest.raises(ValueError, match="contexts of 2 rows do not fit q"):
        paged_decode_triton(paged.queries(3), paged.k_pool, paged.v_pool, 1.0, contexts)


@needs_gpu
@pytest.mark.parametrize("T", [2, 4, 8])
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256), (16, 2, 256), (6, 2, 80)])
def test_rows_of_real_shapes(H: int, KV: int, D: int, T: int):
    starts = [1, 60, 127, 4999, 8191] * 3
    check_rows([drafts(start, T - i % 2, T) for i, start in enumerate(starts)], H, KV, D, torch.bfloat16)


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


@needs_gpu
def test_a_captured_decode_replays_with_other_contexts():
    paged = Paged([900, 40], 4, 2, 64, torch.bfloat16)
    q = paged.queries(2)
    full = PagedContexts.build([900, 40], paged.blocks, BLOCK, DEVICE)
    static = PagedContexts(torch.ones_like(full.lens_R), full.table_NM)
    run = lambda: paged_decode_triton(q, paged.k_pool, paged.v_pool, 0.125, static)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    static.lens_R.copy_(full.lens_R)
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
