"""Short prefills in Triton over a split context against float64, on a GPU or in the interpreter."""

from functools import partial

import pytest
import torch

from benchmarks.shapes import SHAPES
from headrace.kernels.attention.extend import (
    AT_ONCE,
    MERGED_ROWS,
    ExtendTile,
    extend_splits,
    extend_tile,
    paged_extend_triton,
)
from headrace.kernels.attention.prefill import PagedChunks
from tests.kernels.attention.paged import BLOCK, DEVICE, Paged, check_prefill
from tests.support.kernels.compiled import Launch, compile_for_h200

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: too large for the interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize("spans", [[(0, 1)], [(61, 93)], [(0, 20), (33, 50), (0, 1), (120, 131)]], ids=str)
def test_rows_see_their_prefix_and_themselves(spans: list[tuple[int, int]], splits: int, dtype: torch.dtype):
    tile = ExtendTile(16, 16, 16, 4, 2)
    check_prefill(spans, 4, 2, 16, dtype, partial(paged_extend_triton, splits=splits, tile=tile))


@pytest.mark.parametrize(("H", "KV", "D"), [(3, 1, 16), (2, 2, 48), (8, 1, 10)])
def test_any_number_of_query_heads_of_any_size_is_a_group(H: int, KV: int, D: int):
    check_prefill([(7, 30)], H, KV, D, torch.float32, partial(paged_extend_triton, splits=2))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256), (6, 2, 80), (20, 1, 96)])
@pytest.mark.parametrize(
    "spans", [[(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100)], [(8176, 8192)], [(5000, 5256)]], ids=str
)
def test_real_shapes(spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype):
    check_prefill(spans, H, KV, D, dtype, paged_extend_triton)


def test_splits_follow_from_shapes():
    def splits(rows: int, table_blocks: int, H: int = 32, KV: int = 8, D: int = 64) -> int:
        q = torch.empty(rows, H, D, dtype=torch.bfloat16)
        table = torch.empty(1, table_blocks, dtype=torch.int32)
        chunks = PagedChunks(table[0, :1], table[0, :1], table)
        return extend_splits(q, torch.empty(1, BLOCK, KV, D), chunks)

    assert [splits(rows, 8192) for rows in (16, 64, 256, 512, 1024, 8192)] == [32, 8, 2, 2, 1, 1]
    assert splits(16, 8192, 16, 4, 256) == 64
    assert splits(16, 16) == 1 and splits(16, 17) == 2  # 256 keys are one split's


def test_no_rows_are_none():
    paged = Paged([1], 2, 1, 16)
    chunks = PagedChunks.build([], [], [], BLOCK, DEVICE)
    assert paged_extend_triton(paged.queries(0), paged.k_pool, paged.v_pool, 1.0, chunks).shape == (0, 2, 16)


def test_kernels_compile_for_an_h200_and_spill_nothing():
    launches = []
    for shape in SHAPES.values():
        c = shape.attention
        assert c is not None
        for dtype, name in ((torch.bfloat16, "*bf16:16"), (torch.float32, "*fp32:16")):
            tile, group = extend_tile(c.head_dim, dtype), c.num_heads // c.num_kv_heads
            types = {each: name for each in ("q_ptr", "k_ptr", "v_ptr")}
            types |= {each: "*fp32:16" for each in ("part_ptr", "log_sum_ptr")}
            types |= {each: "*i32" for each in ("first_row_ptr", "start_ptr", "table_ptr")}
            types |= {"num_sequences": "i32", "stride_q": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16"}
            types |= {"stride_table": "i32", "scale_log2": "fp32"}
            constexprs = {"H": c.num_heads, "GROUP": group, "PADDED_GROUP": group, "D": c.head_dim, "BLOCK_SIZE": BLOCK,
                          "TOKENS": tile.rows // group, "KEYS": tile.keys, "SPLIT_KEYS": tile.split_keys}  # fmt: skip
            kernel = "headrace.kernels.attention.extend:_extend_kernel"
            launches.append(Launch(kernel, types, constexprs, tile.num_warps, tile.num_stages))
            types = {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16", "out_ptr": name}
            types |= {"num_rows": "i32", "splits": "i32"}
            constexprs = {"D": c.head_dim, "ROWS": MERGED_ROWS, "AT_ONCE": AT_ONCE}
            launches.append(Launch("headrace.kernels.attention.extend:_merge_kernel", types, constexprs))
    for report in compile_for_h200(launches):
        assert report.stack_bytes == 0 and report.shared_bytes <= 227 * 1024
