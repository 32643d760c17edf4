"""Multi-head latent attention over a paged pool of latents: one vector a token, for the keys and values of all heads.

    key_h = [K_h c, s]        value_h = V_h c        latent = [c, s]: c compressed, s the part that all keys share

Shapes    q [T, H, N + S]; latents [T, R + S]; pool [P, bs, 1, R + S], any stride over blocks; key_HNR, value_HVR;
          returns [T, H, V]. T packed rows, H heads, P blocks of bs tokens
Contract  `store_latents` has written this step's latents to the pool; a row sees the sequence's tokens up to its own
          position: memory past a sequence's end may hold anything, NaN included. (block, offset) pairs are unique;
          Triton reads them early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written them just
          before
Numerics  softmax in float32, the result in q's dtype
Source    DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Prompts expand keys and values from the latents of their
          context; decodes project queries instead and attend to latents as to one KV head (`absorbed`)

Legend    N sequences, n tokens of context
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.latent_paged import attend_latents_triton
from headrace.kernels.attention.paged_attention import PagedDecode, PagedPrefill, paged_decode_torch
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.dense.rms_norm import rms_norm_torch
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

EXPANDED_ROWS = 256
"""On a GPU, the least rows a sequence that have keys and values expanded: Kimi's take 131,000 products a head and token
of context, and then each row 320 with it instead of 1,088. Not measured."""
EXPANDED_VALUES = 1 << 28
"""Keys expanded at a time: half a gigabyte, and as much for values."""


@dataclass(frozen=True)
class LatentHeads:
    """The heads' projections of a latent's first R values."""

    key_HNR: Tensor
    value_HVR: Tensor

    @property
    def size(self) -> int:
        return self.value_HVR.shape[2]

    def of(self, some: slice) -> "LatentHeads":
        """Some of the heads."""
        return LatentHeads(self.key_HNR[some], self.value_HVR[some])

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries [T, H, R + S] of latents, for the same scores as q has with keys."""
        own, shared = q.tensor_split([self.key_HNR.shape[1]], dim=-1)
        return torch.cat((torch.bmm(own.transpose(0, 1), self.key_HNR).transpose(0, 1), shared), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """[T, H, V] of attended latents [T, H, R]."""
        return torch.bmm(attended.transpose(0, 1), self.value_HVR.transpose(1, 2)).transpose(0, 1)

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [H, n, N + S] and values [H, n, V] of latents [n, R + S]."""
        compressed, shared = latents.tensor_split([self.size], dim=-1)
        own = torch.matmul(compressed, self.key_HNR.transpose(1, 2))
        keys = torch.cat((own, shared.expand(len(own), *shared.shape)), dim=-1)
        return keys, torch.matmul(compressed, self.value_HVR.transpose(1, 2))


def store_latents(latents: Tensor, norm_R: Tensor, eps: float, pool: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
    """Norms the compressed parts, in place, and writes latent t to offset offset_T[t] of block block_T[t]."""
    if latents.shape[1:] != pool.shape[3:] or latents.dtype != pool.dtype:
        raise ValueError(
            f"latents {tuple(latents.shape)} {latents.dtype} do not fit the pool {tuple(pool.shape)} {pool.dtype}"
        )
    store = store_latents_triton if runs_triton(latents) else store_latents_torch
    store(latents, norm_R, eps, pool, block_T, offset_T)


def store_latents_torch(
    latents: Tensor, norm_R: Tensor, eps: float, pool: Tensor, block_T: Tensor, offset_T: Tensor
) -> None:
    compressed = latents[:, : len(norm_R)]
    compressed.copy_(rms_norm_torch(compressed, norm_R, eps))
    pool[block_T, offset_T] = latents[:, None]


@triton.jit
def _store_latents_kernel(
    latents_ptr, norm_ptr, pool_ptr, block_ptr, offset_ptr, stride_latents, stride_block, stride_token, eps,
    R: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    c, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    place = tl.load(block_ptr + row).to(tl.int64) * stride_block + tl.load(offset_ptr + row) * stride_token
    norm = tl.load(norm_ptr + c, mask=c < R, other=0.0)
    wait_for_previous()
    latents_ptr += row * stride_latents
    x = tl.load(latents_ptr + c, mask=c < R, other=0.0)
    shared = tl.load(latents_ptr + R + s, mask=s < S, other=0.0)
    wide = x.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / R + eps) * norm).to(x.dtype)
    tl.store(latents_ptr + c, y, mask=c < R)
    tl.store(pool_ptr + place + c, y, mask=c < R)
    tl.store(pool_ptr + place + R + s, shared, mask=s < S)


def store_latents_triton(
    latents: Tensor, norm_R: Tensor, eps: float, pool: Tensor, block_T: Tensor, offset_T: Tensor
) -> None:
    (T, D), R = latents.shape, len(norm_R)
    if latents.stride(1) != 1 or pool.stride(3) != 1:
        raise ValueError(f"strides {latents.stride()} and {pool.stride()}: values of a latent must lie side by side")
    if T:
        _store_latents_kernel[(T,)](
            latents, norm_R, pool, block_T, offset_T, latents.stride(0), pool.stride(0), pool.stride(1), eps,
            R=R, S=D - R, BLOCK_R=next_power_of_2(R), BLOCK_S=next_power_of_2(D - R), num_warps=4, **OVERLAPPED,
        )  # fmt: skip


def latent_prefill(
    q: Tensor, latents: Tensor, pool: Tensor, heads: LatentHeads, scale: float, batch: PagedPrefill
) -> Tensor:
    if sum(batch.lengths) != len(q) or len(latents) != len(q):
        raise ValueError(f"q {tuple(q.shape)} and latents {tuple(latents.shape)} do not fit rows {batch.lengths}")
    chunks = batch.chunks
    if isinstance(chunks, PagedChunks):
        if batch.starts is None or len(q) < EXPANDED_ROWS * len(batch.lengths):
            return heads.values(attend_latents_triton(heads.absorbed(q), pool, heads.size, scale, chunks))
        starts, blocks = batch.starts, chunks.table_NM.unbind()
    else:
        starts, blocks = chunks.starts, chunks.blocks
    out = []
    of_each = zip(q.split(batch.lengths), latents.split(batch.lengths), strict=True)
    for (q_THD, own), start, ids in zip(of_each, starts, blocks, strict=True):
        context, end = own, start + len(own)
        if start and ids is not None:
            # The slice ends at the sequence's last token: the rest of its block is never read.
            context = pool.index_select(0, ids[: cdiv(end, pool.shape[1])]).flatten(0, 2)[:end]
        out.append(_expanded_attention(q_THD.transpose(0, 1), context, heads, scale))
    return torch.cat(out)


def _expanded_attention(q_HTD: Tensor, context: Tensor, heads: LatentHeads, scale: float) -> Tensor:
    """[T, H, V] of the last T tokens of a context [n, R + S], by some heads at a time."""
    from torch.nn.attention.bias import causal_lower_right  # here: it brings all of torch's compiler

    (H, T, D), n = q_HTD.shape, len(context)
    some = max(1, EXPANDED_VALUES // (n * D))
    visible = causal_lower_right(T, n)
    out = []
    for first in range(0, H, some):
        keys, values = heads.of(slice(first, first + some)).expanded(context)
        V = values.shape[2]
        # torch has fused attention only where values are as wide as keys.
        values = F.pad(values, (0, max(0, D - V)))
        q = q_HTD[None, first : first + some]
        attended = F.scaled_dot_product_attention(q, keys[None], values[None], attn_mask=visible, scale=scale)
        out.append(attended[0, :, :, :V])
    return torch.cat(out).transpose(0, 1)


def latent_decode(q: Tensor, pool: Tensor, heads: LatentHeads, scale: float, batch: PagedDecode) -> Tensor:
    """Results [rows, H, V] of q's rows."""
    if len(q) != batch.num_rows:
        raise ValueError(f"q {tuple(q.shape)} does not fit {batch.num_rows} rows")
    if isinstance(batch.contexts, PagedContexts):
        return heads.values(attend_latents_triton(heads.absorbed(q), pool, heads.size, scale, batch.contexts))
    attended = paged_decode_torch(heads.absorbed(q), pool, pool, scale, batch.contexts)
    return heads.values(attended[..., : heads.size])
