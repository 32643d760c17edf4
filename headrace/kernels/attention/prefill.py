"""Causal attention of packed prompt chunks over the paged KV pool, in Triton: `paged_prefill` on a GPU.

    out_t = softmax(scale * q_t K^T) V        K, V: the sequence's tokens 0 .. t, read through its block table

Shapes    q [T, H, D], any stride over rows; k_pool, v_pool [P, bs, Hkv, D], of the same strides; returns [T, H, D]
Contract  T packed rows of N sequences, whose own keys and values are in the pool already. D is at most 256; powers of
          two waste nothing. The launch grid follows from T, N and Hkv alone
Numerics  online softmax in float32; products of bf16 operands accumulate in float32, of float32 ones in full
          precision; the weights are rounded to the values' dtype before their product
Source    Dao 2023, "FlashAttention-2"; Kwon et al. 2023, "PagedAttention". The query heads of one KV head are
          rows of one tile, so that its keys are read once and a tile spans few tokens: less of it is masked

Legend    N sequences, M blocks of the longest, G = H / Hkv query heads a KV head, padded to a power of two
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.head_dims import LARGEST_HEAD_DIM, inside, load_heads, padded
from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class PagedChunks:
    """Rows, starts and blocks of each sequence: int32, on the device."""

    first_row_N1: Tensor  # [N + 1], of the packed rows; the last is T
    start_N: Tensor  # tokens before the first row
    table_NM: Tensor  # past a sequence's last block any ids, in captured passes stale ones: never read as context

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "PagedChunks":
        first_rows = [0]
        for length in lengths:
            first_rows.append(first_rows[-1] + length)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        width, table = padded_table(ends, block_ids, block_size)
        first_row_N1, start_N, flat = upload_lists([first_rows, starts, table], device, torch.int32)
        return cls(first_row_N1, start_N, flat.view(len(lengths), width))


def padded_table(ends: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int) -> tuple[int, list[int]]:
    """Width and rows, flattened, of the table of each sequence's blocks up to token `ends`, padded with 0."""
    width = max((cdiv(end, block_size) for end in ends), default=0)
    table: list[int] = []
    for end, ids in zip(ends, block_ids, strict=True):
        used = cdiv(end, block_size)
        table.extend(ids[:used])
        table.extend([0] * (width - used))
    return width, table


class PrefillTile(NamedTuple):
    """A program's tile: `rows` query rows (tokens times padded heads) against `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tile(head_dim: int, dtype: torch.dtype) -> PrefillTile:
    """Sized by registers and shared memory of sm_90 (tests/kernels/attention/test_prefill.py compiles them)."""
    if dtype == torch.float32:  # full-precision products run outside the tensor cores: small tiles, for tests
        return PrefillTile(16, 16, 8, 1)
    # The block table takes two stages of its own: with three stages a program would wait for keys just requested. For
    # heads of 256 the larger tile spills a little, and is still the fastest measured (docs/gpu-notes.md).
    return PrefillTile(128, 64, 8, 5 if head_dim <= 128 else 2)


@triton.jit
def _wide(x):
    """A non-negative int32 as 64 bits: a product of two such is one instruction, of signed ones four."""
    return tl.cast(tl.cast(x, tl.uint32), tl.uint64)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, position, end, first_key, last_key,
    stride_block, stride_token, scale_log2,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [first_key, last_key), in steps of KEYS."""
    d = tl.arange(0, padded(D))
    for start in range(first_key, last_key, KEYS):
        key = start + tl.arange(0, KEYS)
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        place = _wide(block) * _wide(stride_block) + (key % BLOCK_SIZE) * stride_token
        k = load_heads(k_ptr + place[:, None] + d[None, :], d, D)
        if UPCAST_DOT:
            k = k.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:  # also replaces scores of keys past the sequence, which may be NaN
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
        weight = tl.exp2(score * scale_log2 - new_max[:, None])  # scale > 0: a fused multiply-add
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
        acc = acc * shrink[:, None]
        if MASKED:  # a weight of zero does not hide a NaN
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=inside(key < end, d, D), other=0.0)
        else:
            v = load_heads(v_ptr + place[:, None] + d[None, :], d, D)
        weight = weight.to(v.dtype)
        if UPCAST_DOT:
            weight, v = weight.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(weight, v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(  # one compiled kernel for any number of sequences and any address of the tables
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["first_row_ptr", "start_ptr", "table_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, first_row_ptr, start_ptr, table_ptr,
    num_sequences, stride_q, stride_block, stride_token, stride_table, scale_log2,
    H: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One KV head's TOKENS tokens of one sequence. Late tokens have most keys: their programs start first."""
    kv_head = tl.program_id(0) % HKV
    tile = tl.num_programs(0) // HKV - 1 - tl.program_id(0) // HKV
    # Sequence i's tiles start at first_row[i] // TOKENS + i, which leaves each one a tile for its rest.
    sequence, behind = 0, num_sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        is_before = tl.load(first_row_ptr + middle) // TOKENS + middle <= tile
        sequence = tl.where(is_before, middle, sequence)
        behind = tl.where(is_before, behind, middle)
    first_row = tl.load(first_row_ptr + sequence)
    length = tl.load(first_row_ptr + sequence + 1) - first_row
    first_token = (tile - first_row // TOKENS - sequence) * TOKENS
    if first_token >= length:
        return
    start = tl.load(start_ptr + sequence)
    end = start + tl.minimum(first_token + TOKENS, length)

    row = tl.arange(0, TOKENS * PADDED_GROUP)
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    d = tl.arange(0, padded(D))
    row_in_q = (first_row + token).to(tl.int64)
    head_d = ((kv_head * GROUP + member) * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + row_in_q[:, None] * stride_q + head_d, mask=inside(is_row, d, D), other=0.0)
    if UPCAST_DOT:
        q = q.to(tl.float32)

    acc = tl.zeros([TOKENS * PADDED_GROUP, padded(D)], tl.float32)
    row_max = tl.full([TOKENS * PADDED_GROUP], float("-inf"), tl.float32)
    row_sum = tl.zeros([TOKENS * PADDED_GROUP], tl.float32)
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    table_ptr += sequence * stride_table
    all_see = (start + first_token + 1) // KEYS * KEYS  # every row of the tile sees the keys before this one
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, start + token, end, 0, all_see,
        stride_block, stride_token, scale_log2, D, BLOCK_SIZE, KEYS, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, start + token, end, all_see, end,
        stride_block, stride_token, scale_log2, D, BLOCK_SIZE, KEYS, True,
    )  # fmt: skip
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_in_q[:, None] * (H * D) + head_d, out, mask=inside(is_row, d, D))


def paged_prefill_triton(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    chunks: PagedChunks,
    tile: PrefillTile | None = None,
) -> Tensor:
    T, H, D = q.shape
    num_sequences, num_kv = len(chunks.start_N), k_pool.shape[2]
    check_paged(q, k_pool, v_pool)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    tile = tile or prefill_tile(D, q.dtype)
    padded_group = next_power_of_2(H // num_kv)
    tokens = max(tile.rows // padded_group, 1)
    _prefill_kernel[((T // tokens + num_sequences) * num_kv,)](
        q, k_pool, v_pool, out, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_sequences, q.stride(0), k_pool.stride(0), k_pool.stride(1), chunks.table_NM.stride(0), scale * LOG2_E.value,
        H=H, HKV=num_kv, GROUP=H // num_kv, PADDED_GROUP=padded_group, D=D,
        BLOCK_SIZE=k_pool.shape[1], TOKENS=tokens, KEYS=tile.keys,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def check_paged(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Raises ValueError unless the paged kernels take such queries and pools."""
    H, D = q.shape[1:]
    if D > LARGEST_HEAD_DIM:
        raise ValueError(f"head dim {D}: attention on a GPU takes at most {LARGEST_HEAD_DIM}")
    if q.stride()[1:] != (D, 1):
        raise ValueError(f"q has strides {q.stride()}: each row's heads must lie side by side")
    if k_pool.stride() != v_pool.stride() or k_pool.stride()[2:] != (D, 1) or H % k_pool.shape[2]:
        raise ValueError(f"pools {tuple(k_pool.shape)} with strides {k_pool.stride()}, {v_pool.stride()} do not fit q")
