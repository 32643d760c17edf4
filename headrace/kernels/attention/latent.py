"""Multi-head latent attention over a paged pool of latents: one vector a token, for the keys and values of all heads.

    key_h = [K_h c, s]        value_h = V_h c        latent = [c, s]: c compressed, s the part that all keys share

Shapes    q [T, H, N + S]; latents [T, R + S]; pool [P, bs, 1, R + S], any stride over blocks; key_HNR, value_HVR;
          returns [T, H, V]. T packed rows, H heads, P blocks of bs tokens
Contract  `store_latents` has written this step's latents to the pool; a row sees the sequence's tokens up to its own
          position: memory past a sequence's end may hold anything, NaN included
Numerics  softmax in float32, the result in q's dtype
Source    DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Prompts expand keys and values from the latents of their
          context; decodes project queries instead and attend to latents as to one KV head (`absorbed`)

Legend    N sequences, n tokens of context
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import DenseChunks, PagedDecode, PagedPrefill, paged_decode_torch


@dataclass(frozen=True)
class LatentHeads:
    """The heads' projections of a latent's first R values."""

    key_HNR: Tensor
    value_HVR: Tensor

    @property
    def size(self) -> int:
        return self.value_HVR.shape[2]

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


def store_latents(latents: Tensor, pool: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
    """Writes row t to offset offset_T[t] of block block_T[t]."""
    if latents.shape[1:] != pool.shape[3:] or latents.dtype != pool.dtype:
        raise ValueError(
            f"latents {tuple(latents.shape)} {latents.dtype} do not fit the pool {tuple(pool.shape)} {pool.dtype}"
        )
    pool[block_T, offset_T] = latents[:, None]


def latent_prefill(
    q: Tensor, latents: Tensor, pool: Tensor, heads: LatentHeads, scale: float, batch: PagedPrefill
) -> Tensor:
    if sum(batch.lengths) != len(q) or len(latents) != len(q):
        raise ValueError(f"q {tuple(q.shape)} and latents {tuple(latents.shape)} do not fit rows {batch.lengths}")
    if not isinstance(batch.chunks, DenseChunks):
        raise ValueError("latent attention has no kernels for a GPU: serve this model on the CPU")
    return latent_prefill_torch(q, latents, pool, heads, scale, batch.lengths, batch.chunks)


def latent_prefill_torch(
    q: Tensor,
    latents: Tensor,
    pool: Tensor,
    heads: LatentHeads,
    scale: float,
    lengths: Sequence[int],
    chunks: DenseChunks,
) -> Tensor:
    out = []
    of_each = zip(q.split(list(lengths)), latents.split(list(lengths)), strict=True)
    for (q_THD, own), start, blocks, visible in zip(of_each, chunks.starts, chunks.blocks, chunks.visible, strict=True):
        context = own
        if blocks is not None:
            # The slice ends at the sequence's last token: the rest of its block is never read.
            context = pool.index_select(0, blocks).flatten(0, 2)[: start + len(own)]
        keys, values = heads.expanded(context)
        V = values.shape[2]
        attended = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None],
            keys[None],
            # torch fuses attention on the CPU only where values are as wide as keys.
            F.pad(values, (0, max(0, keys.shape[2] - V)))[None],
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
        )
        out.append(attended[0, :, :, :V].transpose(0, 1))
    return torch.cat(out)


def latent_decode(q: Tensor, pool: Tensor, heads: LatentHeads, scale: float, batch: PagedDecode) -> Tensor:
    """One row of each sequence, [N, H, V]."""
    if len(q) != batch.num_sequences:
        raise ValueError(f"q {tuple(q.shape)} does not fit {batch.num_sequences} sequences")
    if isinstance(batch.contexts, PagedContexts):
        raise ValueError("latent attention has no kernels for a GPU: serve this model on the CPU")
    attended = paged_decode_torch(heads.absorbed(q), pool, pool, scale, batch.contexts)
    return heads.values(attended[..., : heads.size])
