"""Multi-head latent attention over the paged pool, without positional encoding.

Legend    T rows, H heads, N a key's own part, S its shared part, R the compressed part of a latent, V a value
"""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.attention.latent import LatentHeads, latent_decode, latent_prefill, store_latents
from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.models.config import AttentionConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class LatentAttention:
    """A latent attention layer. One projection gives queries and latents, whose compressed part is normed."""

    config: AttentionConfig
    index: int  # among the attention layers: the layer's place in a block
    norm_eps: float
    in_proj: LinearWeight  # [H (N + S) + R + S, hidden]
    norm_R: Tensor  # float32
    heads: LatentHeads
    out_proj: LinearWeight  # [hidden, H V]

    @classmethod
    def load(
        cls, weights: WeightSource, prefix: str, config: AttentionConfig, index: int, hidden: int, norm_eps: float
    ) -> "LatentAttention":
        """From q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj."""
        import_module("torch.nn.attention.bias")  # 2.5 s, which its first prompt would wait for otherwise
        c, H = config.latent, config.num_heads
        assert c is not None
        q = weights.matrix(f"{prefix}.q_proj.weight", (H * (c.key_dim + c.shared_key_dim), hidden))
        latent = weights.matrix(f"{prefix}.kv_a_proj_with_mqa.weight", (config.head_dim, hidden))
        heads = weights.take(f"{prefix}.kv_b_proj.weight", (H * (c.key_dim + c.value_dim), c.size))
        key_HNR, value_HVR = heads.view(H, -1, c.size).split((c.key_dim, c.value_dim), dim=1)
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=LinearWeight(stack_rows((q, latent))),
            norm_R=weights.take(f"{prefix}.kv_a_layernorm.weight", (c.size,), torch.float32),
            heads=LatentHeads(key_HNR.contiguous(), value_HVR.contiguous()),
            out_proj=LinearWeight(weights.matrix(f"{prefix}.o_proj.weight", (hidden, H * c.value_dim))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return self.in_proj.reads

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        batch, n, scale = context.batch, context.batch.num_decodes, self.config.scale
        q, latents, pool = self._prepare(x, context)
        parts = []
        if batch.decode is not None:
            parts.append(latent_decode(q[:n], pool, self.heads, scale, batch.decode.attention))
        if batch.prefill is not None:
            parts.append(latent_prefill(q[n:], latents[n:], pool, self.heads, scale, batch.prefill.attention))
        return Product(batch.join(parts).flatten(1), self.out_proj)

    def attend_rows(self, x: Rows, context: LayerContext, rows: Tensor) -> Product:
        """Outputs of `rows` alone: none, or those of `last_token_queries`. All latents go to the pool."""
        queries = context.batch.last_token_queries
        q, _, pool = self._prepare(x, context)
        if queries is None:
            return Product(q.new_empty(0, self.out_proj.in_features), self.out_proj)
        attended = latent_decode(q.index_select(0, rows), pool, self.heads, self.config.scale, queries)
        return Product(attended.flatten(1), self.out_proj)

    def _prepare(self, x: Rows, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, N + S], latents [T, R + S], and the pool, which has them, too."""
        H, pool = self.config.num_heads, context.memory.kv_pools[self.index][0]
        q, latents = self.in_proj(x).tensor_split([-self.config.head_dim], dim=-1)
        store_latents(latents, self.norm_R, self.norm_eps, pool, context.batch.block_T, context.batch.offset_T)
        return q.unflatten(1, (H, -1)), latents, pool
