"""Attention of one query row a sequence, or a few, over the paged KV pool, in Triton: `paged_decode` on a GPU.

    out_r = softmax(scale * q_r K^T) V [* sigmoid(gate_r)]        K, V: the first lens_R[r] tokens of row r's sequence,
                                                                  with `skip_first` without the first of all

Shapes    q and, if there is one, gate [R, H, D], any stride over rows; k_pool, v_pool [P, bs, Hkv, D], of
          the same strides; returns [R, H, D]
Contract  D is at most 256; a context of no tokens (a padding row) gives zeros; with `skip_first` a
          context has no token or at least two. Grid and split
          count follow from R, N, Hkv and the table's width alone, never from the contexts: captured graphs replay
          with other contexts. Contexts and table are read early: an overlapped kernel (headrace/kernels/lib/pdl.py)
          must not have written them just before
Numerics  as in prefill.py; the splits are merged in float32
Source    Dao et al. 2023, "Flash-Decoding": the context is cut among programs, a second kernel merges them. The
          query heads of one KV head, of each of the sequence's rows, are the rows of one product, padded to the 16 that
          `tl.dot` needs: a context is read once for all of them

Legend    N sequences, R rows, T = R / N of each sequence, side by side, M blocks of the longest, S splits
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.head_dims import inside, inside_parts, load_heads, padded
from headrace.kernels.attention.prefill import check_paged, padded_table
from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.dot import dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv, next_power_of_2
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class PagedContexts:
    """Context length of each row and blocks of each sequence: int32, on the device."""

    lens_R: Tensor  # tokens of context, the row's own included; none: the row sees nothing
    table_NM: Tensor  # entries past a sequence's last block are not read

    @classmethod
    def build(
        cls, context_lens: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int, device: torch.device
    ) -> "PagedContexts":
        """Contexts of sequences of one row."""
        width, table = padded_table(context_lens, block_ids, block_size)
        lens_R, flat = upload_lists([context_lens, table], device, torch.int32)
        return cls(lens_R, flat.view(len(context_lens), width))

    @property
    def rows_each(self) -> int:
        """T."""
        R, N = len(self.lens_R), len(self.table_NM)
        if R % max(1, N):
            raise ValueError(f"{R} rows are not as many for each of {N} sequences")
        return R // max(1, N)


class DecodeTile(NamedTuple):
    """A program's tile: `keys` keys at a time, at least `split_keys`, a multiple, where the context has as many."""

    keys: int
    split_keys: int
    num_warps: int
    num_stages: int


MOST_ROWS = 64  # query heads of a KV head times rows of a sequence, in one program


def tokens_at_once(rows_each: int, group: int) -> int:
    """Rows of one sequence that a program takes: all, or about equal parts of at most MOST_ROWS query heads."""
    return cdiv(rows_each, cdiv(rows_each, max(1, MOST_ROWS // group)))


def decode_tile(head_dim: int, dtype: torch.dtype, rows: int = 16, least_programs: int = MULTIPROCESSORS) -> DecodeTile:
    """32 to 64 KiB of keys and values in flight a program, two programs or more a multiprocessor.

    rows              of the product. More than 16 of wide heads take a thread 150 to 250 registers with four warps
    least_programs    if no context is split. While they leave multiprocessors idle, splits of two steps end sooner
    """
    if dtype == torch.float32:
        return DecodeTile(16, 128, 4, 1)
    keys, num_warps = 64 if head_dim <= 128 else 32, 4 if rows <= 16 or head_dim <= 64 else 8
    return DecodeTile(keys, 128 if least_programs >= MULTIPROCESSORS else 2 * keys, num_warps, 3)


TARGET_PROGRAMS = 2048  # about 15 for each of 132 multiprocessors (H200): uneven contexts even out
LEAST_SPLITS = 4  # in a large batch, one program a KV head would be too few for one long context
MOST_SPLITS = 64
FEW_SPLITS = tl.constexpr(8)  # of so few, as in large batches, a program merges several heads
FEW_AT_ONCE, MANY_AT_ONCE = tl.constexpr(4), tl.constexpr(32)
"""Splits that a program merges at once, of several heads and of one: more would take other programs' registers."""


def num_splits(num_tiles: int, num_kv_heads: int, table_tokens: int, split_keys: int) -> int:
    """Splits of each context: a power of two, from shapes alone."""
    wanted = max(LEAST_SPLITS, cdiv(TARGET_PROGRAMS, num_tiles * num_kv_heads))
    useful = cdiv(table_tokens, split_keys)
    return next_power_of_2(max(1, min(wanted, useful, MOST_SPLITS)))


@triton.jit
def _split_of(length, splits, least_steps, KEYS: tl.constexpr):
    """Keys a split, a multiple of KEYS; the last splits may have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), splits), least_steps) * KEYS


@triton.jit
def _longest(lens_ptr, sequence, first, T: tl.constexpr, TOKENS: tl.constexpr):
    """The longest context of TOKENS rows of a sequence, or of as many as there are from `first` on."""
    lens_ptr += sequence * T + first
    length = tl.load(lens_ptr)
    for i in tl.static_range(1, TOKENS):
        length = tl.maximum(length, tl.load(lens_ptr + i, mask=first + i < T, other=0))
    return length


@triton.jit(  # one compiled kernel for tables of any width and address
    do_not_specialize=["stride_table", "least_steps"], do_not_specialize_on_alignment=["lens_ptr", "table_ptr"]
)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, log_sum_ptr, lens_ptr, table_ptr,
    stride_q, stride_block, stride_token, stride_table, least_steps, scale_log2,
    H: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SKIP_FIRST: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's context for the GROUP query heads of one KV head, of TOKENS of its T rows. part
    [R, H, S, D] and log_sum [R, H, S], base 2, are float32; splits without keys write nothing, and what a row without
    keys writes is not read."""
    let_next_start()
    kv_head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    sequence = tl.program_id(0) // tl.cdiv(T, TOKENS)
    first_token = tl.program_id(0) % tl.cdiv(T, TOKENS) * TOKENS
    length = _longest(lens_ptr, sequence, first_token, T, TOKENS)
    split_keys = _split_of(length, splits, least_steps, KEYS)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, length)
    row = tl.arange(0, ROWS)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < T)
    row_in_q = sequence.to(tl.int64) * T + token
    limit = length
    if T > 1:
        limit = tl.load(lens_ptr + row_in_q, mask=is_row, other=0)
    table_ptr += sequence.to(tl.int64) * stride_table
    key = first_key + tl.arange(0, KEYS)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < last_key, other=0)
    wait_for_previous()
    if first_key >= length:
        return

    d = tl.arange(0, padded(D))
    q_place = row_in_q[:, None] * stride_q + (head * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_place, mask=inside(is_row, d, D), other=0.0)
    if UPCAST_DOT:
        q = q.to(tl.float32)
    acc = tl.zeros([ROWS, padded(D)], tl.float32)
    row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see no keys of the split
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
        sees = is_key[None, :]
        if T > 1:
            sees &= key[None, :] < limit[:, None]
        score = tl.where(sees, score, float("-inf"))
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
    out = (row_in_q * H + head) * splits + split
    total = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(part_ptr + out[:, None] * D + d[None, :], acc / total[:, None], mask=inside(is_row, d, D))
    tl.store(log_sum_ptr + out, row_max + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["splits", "least_steps"], do_not_specialize_on_alignment=["lens_ptr"])
def _merge_kernel(
    part_ptr, log_sum_ptr, gate_ptr, out_ptr, lens_ptr, splits, least_steps, stride_gate,
    H: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over splits of 2^log_sum * part / sum of 2^log_sum, for the splits that have keys; [* gate].

    A program merges HEADS heads of one row; of contexts in more than FEW_SPLITS splits, one head.
    """
    let_next_start()
    heads = tl.where(splits <= FEW_SPLITS, HEADS, 1)
    row, first_head = (tl.program_id(0) // (H // heads)).to(tl.int64), tl.program_id(0) % (H // heads) * heads
    length = tl.load(lens_ptr + row)
    longest = length
    if T > 1:
        longest = _longest(lens_ptr, row // T, row % T // TOKENS * TOKENS, T, TOKENS)
    used = tl.cdiv(length, _split_of(longest, splits, least_steps, KEYS))
    wait_for_previous()
    # Both ways in one kernel: the splits follow from a step's rows, and with two kernels a request might wait for
    # the second one's compiler.
    if splits <= FEW_SPLITS:
        _merge_heads(part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, splits, used, stride_gate,
                     H, D, HEADS, FEW_AT_ONCE)  # fmt: skip
    else:
        _merge_heads(part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, splits, used, stride_gate,
                     H, D, 1, MANY_AT_ONCE)  # fmt: skip


@triton.jit
def _merge_heads(
    part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, splits, used, stride_gate,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes HEADS heads of a row: merged from their first `used` splits, AT_ONCE at a time, and gated; zeros if there
    are none."""
    head, d = first_head + tl.arange(0, HEADS), tl.arange(0, padded(D))
    row_head = row * H + head
    acc = tl.zeros([HEADS, padded(D)], tl.float32)
    total, best = tl.zeros([HEADS], tl.float32), tl.full([HEADS], -1e30, tl.float32)
    for first in range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        place = (row_head * splits)[:, None] + split[None, :]
        is_used = (split < used)[None, :]
        log_sum = tl.load(log_sum_ptr + place, mask=is_used, other=float("-inf"))
        part_place = place[:, :, None] * D + d[None, None, :]
        part = tl.load(part_ptr + part_place, mask=inside_parts(is_used, d, D), other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 1))
        weight, shrink = tl.exp2(log_sum - new_best[:, None]), tl.exp2(best - new_best)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if gate_ptr is not None:
        gate = load_heads(gate_ptr + row * stride_gate + head[:, None] * D + d[None, :], d, D)
        out *= tl.sigmoid(gate.to(tl.float32))
    out_place = row_head[:, None] * D + d[None, :]
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=inside(head < H, d, D))


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
    R, H, D = q.shape
    num_kv, block_size = k_pool.shape[2], k_pool.shape[1]
    check_paged(q, k_pool, v_pool)
    if gate is not None and (gate.shape != q.shape or gate.stride()[1:] != (D, 1)):
        raise ValueError(f"gate {tuple(gate.shape)} of strides {gate.stride()} does not fit q {tuple(q.shape)}")
    if len(contexts.lens_R) != R:
        raise ValueError(f"contexts of {len(contexts.lens_R)} rows do not fit q {tuple(q.shape)}")
    stride_gate = 0 if gate is None else gate.stride(0)
    out = torch.empty((R, H, D), dtype=q.dtype, device=q.device)
    if R == 0:
        return out
    group, T = H // num_kv, contexts.rows_each
    tokens = tokens_at_once(T, group)
    rows, num_tiles = dot_block(tokens * group), R // T * cdiv(T, tokens)
    tile = tile or decode_tile(D, q.dtype, rows, num_tiles * num_kv)
    S = splits or num_splits(num_tiles, num_kv, contexts.table_NM.shape[1] * block_size, tile.split_keys)
    least_steps = tile.split_keys // tile.keys
    part = torch.empty((R, H, S, D), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((R, H, S), dtype=torch.float32, device=q.device)
    _decode_kernel[(num_tiles, num_kv, S)](
        q, k_pool, v_pool, part, log_sum, contexts.lens_R, contexts.table_NM,
        q.stride(0), k_pool.stride(0), k_pool.stride(1), contexts.table_NM.stride(0), least_steps,
        scale * LOG2_E.value,
        H=H, GROUP=group, T=T, TOKENS=tokens, ROWS=rows, D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, SKIP_FIRST=skip_first,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    heads, few = math.gcd(H, 4), FEW_SPLITS.value
    _merge_kernel[(R * H // (heads if few >= S else 1),)](
        part, log_sum, gate, out, contexts.lens_R, S, least_steps, stride_gate,
        H=H, T=T, TOKENS=tokens, D=D, KEYS=tile.keys, HEADS=heads, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return out
