"""Attention of one query row a sequence over the paged KV pool, in Triton: `paged_decode` on a GPU.

    out_i = softmax(scale * q_i K^T) V [* sigmoid(gate_i)]        K, V: sequence i's first context_lens[i] tokens,
                                                                  with `skip_first` without the first of all

Shapes    q and, if there is one, gate [N, H, D], any stride over rows; k_pool, v_pool [P, bs, Hkv, D], of
          the same strides; returns [N, H, D]
Contract  D is at most 256; a context of no tokens (a padding row) gives zeros; with `skip_first` a
          context has no token or at least two. Grid and split
          count follow from N, Hkv and the table's width alone, never from the contexts: captured graphs replay
          with other contexts. Contexts and table are read early: an overlapped kernel (headrace/kernels/lib/pdl.py)
          must not have written them just before
Numerics  as in prefill.py; the splits are merged in float32
Source    Dao et al. 2023, "Flash-Decoding": the context is cut among programs, a second kernel merges them. The
          query heads of one KV head are the rows of one product, padded to the 16 that `tl.dot` needs

Legend    N sequences, M blocks of the longest, S splits
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.head_dims import inside, load_head, padded, store_head
from headrace.kernels.attention.prefill import check_paged, padded_table
from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.dot import dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class PagedContexts:
    """Context length and blocks of each row: int32, on the device."""

    lens_N: Tensor  # tokens of context, the row's own included
    table_NM: Tensor  # entries past a sequence's last block are not read

    @classmethod
    def build(
        cls, context_lens: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int, device: torch.device
    ) -> "PagedContexts":
        width, table = padded_table(context_lens, block_ids, block_size)
        lens_N, flat = upload_lists([context_lens, table], device, torch.int32)
        return cls(lens_N, flat.view(len(context_lens), width))


class DecodeTile(NamedTuple):
    """A program's tile: `keys` keys at a time, at least `split_keys` in all where the context has as many."""

    keys: int
    split_keys: int
    num_warps: int
    num_stages: int


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """32 to 64 KiB of keys and values in flight a program, two programs or more a multiprocessor."""
    if dtype == torch.float32:
        return DecodeTile(16, 128, 4, 1)
    return DecodeTile(64, 128, 4, 3) if head_dim <= 128 else DecodeTile(32, 128, 4, 3)


TARGET_PROGRAMS = 2048  # about 15 for each of 132 multiprocessors (H200): uneven contexts even out
LEAST_SPLITS = tl.constexpr(4)  # in a large batch, one program a KV head would be too few for one long context
MOST_SPLITS = 64
MERGED_AT_ONCE = tl.constexpr(32)  # all 64 splits of a head of 256 would need the registers of all but two programs


def num_splits(num_sequences: int, num_kv_heads: int, table_tokens: int, split_keys: int) -> int:
    """Splits of each context: a power of two, from shapes alone."""
    wanted = max(LEAST_SPLITS.value, cdiv(TARGET_PROGRAMS, num_sequences * num_kv_heads))
    useful = cdiv(table_tokens, split_keys)
    return next_power_of_2(max(1, min(wanted, useful, MOST_SPLITS)))


@triton.jit
def _split_of(length, splits, KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Keys a split, a multiple of KEYS; the last splits may have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), splits) * KEYS, SPLIT_KEYS)


@triton.jit(  # one compiled kernel for tables of any width and address
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["lens_ptr", "table_ptr"]
)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, log_sum_ptr, lens_ptr, table_ptr,
    stride_q, stride_block, stride_token, stride_table, scale_log2,
    H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, SKIP_FIRST: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's context for the GROUP query heads of one KV head. part [N, H, S, D] and log_sum
    [N, H, S], base 2, are float32; splits without keys write nothing."""
    let_next_start()
    sequence, kv_head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lens_ptr + sequence)
    split_keys = _split_of(length, splits, KEYS, SPLIT_KEYS)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, length)
    table_ptr += sequence.to(tl.int64) * stride_table
    key = first_key + tl.arange(0, KEYS)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < last_key, other=0)
    wait_for_previous()
    if first_key >= length:
        return

    member, d = tl.arange(0, ROWS), tl.arange(0, padded(D))
    head = kv_head * GROUP + member
    is_head = member < GROUP
    q_row = q_ptr + sequence.to(tl.int64) * stride_q
    q = tl.load(q_row + head[:, None] * D + d[None, :], mask=inside(is_head, d, D), other=0.0)
    if UPCAST_DOT:
        q = q.to(tl.float32)
    acc = tl.zeros([ROWS, padded(D)], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    for _ in range(first_key, last_key, KEYS):
        is_key = key < last_key
        if SKIP_FIRST:
            is_key &= key > 0
        place = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_token
        k = tl.load(k_ptr + place[:, None] + d[None, :], mask=inside(is_key, d, D), other=0.0)
        v = tl.load(v_ptr + place[:, None] + d[None, :], mask=inside(is_key, d, D), other=0.0)
        if UPCAST_DOT:
            k = k.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        score = tl.where(is_key[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
        weight = weight.to(v.dtype)
        if UPCAST_DOT:
            weight, v = weight.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(weight, v, acc * shrink[:, None], input_precision="ieee")
        # Loaded one step ahead, so that prefetching keys waits for no other load.
        key += KEYS
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < last_key, other=0)
    row_out = (sequence.to(tl.int64) * H + head) * splits + split
    tl.store(part_ptr + row_out[:, None] * D + d[None, :], acc / row_sum[:, None], mask=inside(is_head, d, D))
    tl.store(log_sum_ptr + row_out, row_max + tl.log2(row_sum), mask=is_head)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lens_ptr"])
def _merge_kernel(
    part_ptr, log_sum_ptr, gate_ptr, out_ptr, lens_ptr, splits, stride_gate,
    H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over splits of 2^log_sum * part / sum of 2^log_sum, for the splits that have keys; [* gate]."""
    let_next_start()
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, padded(D))
    length = tl.load(lens_ptr + row // H)
    used = tl.cdiv(length, _split_of(length, splits, KEYS, SPLIT_KEYS))
    part_ptr += row * splits * D
    log_sum_ptr += row * splits
    wait_for_previous()
    if splits <= LEAST_SPLITS:  # large batches: little work for each of many rows
        out = _merged(part_ptr, log_sum_ptr, used, D, LEAST_SPLITS)
    else:
        out = _merged(part_ptr, log_sum_ptr, used, D, MERGED_AT_ONCE)
    if gate_ptr is not None:
        gate = load_head(gate_ptr + row // H * stride_gate + row % H * D + d, d, D)
        out *= tl.sigmoid(gate.to(tl.float32))
    store_head(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), d, D)


@triton.jit
def _merged(part_ptr, log_sum_ptr, used, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """One row, merged from its first `used` splits; zeros if there are none."""
    d = tl.arange(0, padded(D))
    acc = tl.zeros([padded(D)], tl.float32)
    total, best = 0.0, -1e30
    for first in range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        log_sum = tl.load(log_sum_ptr + split, mask=split < used, other=float("-inf"))
        part = tl.load(part_ptr + split[:, None] * D + d[None, :], mask=inside(split < used, d, D), other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 0))
        weight, shrink = tl.exp2(log_sum - new_best), tl.exp2(best - new_best)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
    return acc / tl.where(total > 0, total, 1.0)


def paged_decode_triton(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    contexts: PagedContexts,
    gate: Tensor | None = None,
    tile: DecodeTile | None = None,
    splits: int | None = None,
    skip_first: bool = False,
) -> Tensor:
    N, H, D = q.shape
    num_kv, block_size = k_pool.shape[2], k_pool.shape[1]
    check_paged(q, k_pool, v_pool)
    if gate is not None and (gate.shape != q.shape or gate.stride()[1:] != (D, 1)):
        raise ValueError(f"gate {tuple(gate.shape)} of strides {gate.stride()} does not fit q {tuple(q.shape)}")
    stride_gate = 0 if gate is None else gate.stride(0)
    out = torch.empty((N, H, D), dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    tile = tile or decode_tile(D, q.dtype)
    S = splits or num_splits(N, num_kv, contexts.table_NM.shape[1] * block_size, tile.split_keys)
    part = torch.empty((N, H, S, D), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((N, H, S), dtype=torch.float32, device=q.device)
    _decode_kernel[(N, num_kv, S)](
        q, k_pool, v_pool, part, log_sum, contexts.lens_N, contexts.table_NM,
        q.stride(0), k_pool.stride(0), k_pool.stride(1), contexts.table_NM.stride(0), scale * LOG2_E.value,
        H=H, GROUP=H // num_kv, ROWS=dot_block(H // num_kv), D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, SPLIT_KEYS=tile.split_keys, SKIP_FIRST=skip_first,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    _merge_kernel[(N * H,)](
        part, log_sum, gate, out, contexts.lens_N, S, stride_gate,
        H=H, D=D, KEYS=tile.keys, SPLIT_KEYS=tile.split_keys, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return out
