"""Causal attention over a paged KV pool: chunks of prompts behind a cached prefix, and one-token decodes.

Shapes    q [T, H, D]; k, v [T, Hkv, D]; k_pool, v_pool [P, bs, Hkv, D], any stride over blocks; returns [T,
          H, D]. T packed rows, H query heads, Hkv KV heads (divides H), P blocks of bs tokens
Contract  `store_kv` has written this step's keys and values to the pool; a row sees the sequence's tokens up to
          its own position: memory past a sequence's end may hold anything, NaN included
Numerics  softmax in float32, the result in q's dtype
Source    torch's fused attention on the CPU. On a GPU, prompts go to prefill_hopper.py (heads of 64, 128 and 256 on
          Hopper), extend.py (few rows behind a long context) or prefill.py, decodes to decode.py

Legend    N sequences, M blocks of the longest one, n tokens of context, G = H / Hkv
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention.decode import PagedContexts, paged_decode_triton
from headrace.kernels.attention.extend import extend_splits, paged_extend_triton
from headrace.kernels.attention.output_gate import gate_output_torch
from headrace.kernels.attention.prefill import PagedChunks, paged_prefill_triton
from headrace.kernels.attention.prefill_hopper import fits_hopper, paged_prefill_hopper
from headrace.kernels.lib.sizes import cdiv


@dataclass(frozen=True)
class DenseChunks:
    """Inputs of torch's attention for a prefill."""

    starts: tuple[int, ...]
    blocks: tuple[Tensor | None, ...]  # int64 [ceil(end / bs)]; None without a cached prefix
    visible: tuple[Tensor | None, ...]  # bool [length, end]; None without a cached prefix: plain causal

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "DenseChunks":
        blocks: list[Tensor | None] = []
        visible: list[Tensor | None] = []
        for length, start, ids in zip(lengths, starts, block_ids, strict=True):
            end = start + length
            used = ids[: cdiv(end, block_size)]
            blocks.append(torch.tensor(used, dtype=torch.int64, device=device) if start else None)
            mask = torch.ones(length, end, dtype=torch.bool, device=device).tril_(start) if start else None
            visible.append(mask)
        return cls(tuple(starts), tuple(blocks), tuple(visible))


@dataclass(frozen=True)
class PagedPrefill:
    """A batch of prompt chunks: sequence i has lengths[i] new rows after starts[i] tokens in its blocks."""

    lengths: tuple[int, ...]
    chunks: PagedChunks | DenseChunks  # for Triton, for torch
    starts: tuple[int, ...] | None = None  # None: the host does not know them, as in a captured pass

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "PagedPrefill":
        form = PagedChunks if device.type == "cuda" else DenseChunks
        return cls(tuple(lengths), form.build(lengths, starts, block_ids, block_size, device), tuple(starts))


GATHERED_TOKENS = 16_384
"""At most so many tokens of context are copied side by side: in a batch padded to its longest context, a long one makes
each short one as expensive (30 of 256 tokens and one of 32,000: 1,320 ms a step of the tiny model, in groups 53)."""


@dataclass(frozen=True)
class DenseGroup:
    """Sequences of a decode whose contexts are gathered together, padded to the longest of them."""

    sequences_N: Tensor  # int64: their rows in the batch
    blocks_NM: Tensor  # int64, flattened; past a sequence's last block a valid one is repeated
    max_context: int
    hidden_Nn: Tensor | None  # bool: past the sequence's end; None when all contexts are equally long
    bias_N11n: Tensor | None  # float, -inf where hidden

    @classmethod
    def build(
        cls,
        sequences: Sequence[int],
        context_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "DenseGroup":
        lengths = [context_lens[sequence] for sequence in sequences]
        longest = max(lengths)
        num_blocks = cdiv(longest, block_size)
        table: list[int] = []
        for sequence, length in zip(sequences, lengths, strict=True):
            used = list(block_ids[sequence][: cdiv(length, block_size)])
            table.extend(used + used[-1:] * (num_blocks - len(used)))
        hidden = bias = None
        if min(lengths) != longest:
            hidden = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
            bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]
        rows, blocks = (torch.tensor(values, dtype=torch.int64, device=device) for values in (sequences, table))
        return cls(rows, blocks, longest, hidden, bias)


@dataclass(frozen=True)
class DenseContexts:
    """Inputs of torch's attention for a decode: contexts in groups of about one length."""

    groups: tuple[DenseGroup, ...]

    @classmethod
    def build(
        cls,
        context_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "DenseContexts":
        groups = _side_by_side(context_lens)
        return cls(tuple(DenseGroup.build(group, context_lens, block_ids, block_size, device) for group in groups))


def _side_by_side(context_lens: Sequence[int]) -> list[list[int]]:
    """Indices in groups, shorter contexts first, each of GATHERED_TOKENS at most with its padding, or of one context.

    Within a group they keep their order.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(context_lens)), key=context_lens.__getitem__):
        if groups and (len(groups[-1]) + 1) * context_lens[index] <= GATHERED_TOKENS:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class PagedDecode:
    """A batch of decodes: one row a sequence, the last of its context; for Triton also several, as many of each."""

    num_rows: int
    contexts: PagedContexts | DenseContexts  # for Triton, for torch

    @classmethod
    def build(
        cls,
        context_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> "PagedDecode":
        """Sequences of one row, the last of context_lens[i] tokens."""
        form = PagedContexts if device.type == "cuda" else DenseContexts
        return cls(len(context_lens), form.build(context_lens, block_ids, block_size, device))


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
    """Writes row t to offset offset_T[t] of block block_T[t]. On a GPU `prepare_qkv` does that, too."""
    if k.shape != v.shape or k.shape[1:] != k_pool.shape[2:] or k.dtype != k_pool.dtype:
        raise ValueError(f"k {tuple(k.shape)} {k.dtype} does not fit the pool {tuple(k_pool.shape)} {k_pool.dtype}")
    k_pool[block_T, offset_T] = k
    v_pool[block_T, offset_T] = v


def paged_prefill(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, batch: PagedPrefill
) -> Tensor:
    if sum(batch.lengths) != q.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit rows {batch.lengths}")
    if isinstance(batch.chunks, PagedChunks):
        return _prefill_on_gpu(q, k_pool, batch.chunks)(q, k_pool, v_pool, scale, batch.chunks)
    return paged_prefill_torch(q, k, v, k_pool, v_pool, scale, batch.lengths, batch.chunks)


def _prefill_on_gpu(q: Tensor, k_pool: Tensor, chunks: PagedChunks) -> Callable[..., Tensor]:
    if fits_hopper(q, k_pool):
        return paged_prefill_hopper
    return paged_extend_triton if extend_splits(q, k_pool, chunks) > 1 else paged_prefill_triton


def paged_prefill_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    lengths: Sequence[int],
    chunks: DenseChunks,
) -> Tensor:
    T, H, D = q.shape
    num_kv = k.shape[1]
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    first = 0
    for length, start, blocks, visible in zip(lengths, chunks.starts, chunks.blocks, chunks.visible, strict=True):
        rows = slice(first, first + length)
        keys, values = k[rows], v[rows]
        if blocks is not None:
            # The slice ends at the sequence's last token: the rest of its block is never read.
            keys = k_pool.index_select(0, blocks).flatten(0, 1)[: start + length]
            values = v_pool.index_select(0, blocks).flatten(0, 1)[: start + length]
        # KV heads as batch, their query heads as heads: grouping without copies.
        q_KGTD = q[rows].view(length, num_kv, -1, D).permute(1, 2, 0, 3)
        shape = (num_kv, H // num_kv, len(keys), D)
        attended = F.scaled_dot_product_attention(
            q_KGTD,
            keys.transpose(0, 1)[:, None].expand(shape),
            values.transpose(0, 1)[:, None].expand(shape),
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
        )
        out[rows].view(length, num_kv, -1, D).copy_(attended.permute(2, 0, 1, 3))
        first += length
    return out


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    batch: PagedDecode,
    gate: Tensor | None = None,
    skip_first: bool = False,
) -> Tensor:
    """With a gate of q's shape the result is multiplied by its sigmoid; `skip_first`: nothing is at position 0."""
    if q.shape[0] != batch.num_rows or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} does not fit {batch.num_rows} rows, {k_pool.shape[2]} KV heads")
    if isinstance(batch.contexts, PagedContexts):
        return paged_decode_triton(q, k_pool, v_pool, scale, batch.contexts, gate, skip_first=skip_first)
    attended = paged_decode_torch(q, k_pool, v_pool, scale, batch.contexts, skip_first)
    return attended if gate is None else gate_output_torch(attended, gate)


def paged_decode_torch(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, contexts: DenseContexts, skip_first: bool = False
) -> Tensor:
    if len(contexts.groups) == 1:
        return _attend_group(q, k_pool, v_pool, scale, contexts.groups[0], int(skip_first))
    out = torch.empty_like(q)
    for group in contexts.groups:
        out[group.sequences_N] = _attend_group(q[group.sequences_N], k_pool, v_pool, scale, group, int(skip_first))
    return out


def _attend_group(q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, group: DenseGroup, first: int) -> Tensor:
    N, H, D = q.shape
    num_kv = k_pool.shape[2]
    keys, values = (
        pool.index_select(0, group.blocks_NM).view(N, -1, num_kv, D)[:, first : group.max_context]
        for pool in (k_pool, v_pool)
    )
    bias = None
    if group.hidden_Nn is not None and group.bias_N11n is not None:
        # A weight of zero does not hide a NaN: the copies are cleared past each end.
        hidden_Nn11 = group.hidden_Nn[:, first:, None, None]
        keys.masked_fill_(hidden_Nn11, 0)
        values.masked_fill_(hidden_Nn11, 0)
        bias = group.bias_N11n[..., first:].to(q.dtype)
    # The query heads of one KV head are the rows of one small matrix.
    attended = F.scaled_dot_product_attention(
        q.view(N, num_kv, H // num_kv, D),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=bias,
        scale=scale,
    )
    return attended.reshape(N, H, D)
