"""Grouped-query attention over the paged pool, with the options that hybrid models use.

Legend    T rows, H query heads, J = H + KV heads that get norm and rotation, D head dim
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.attention.output_gate import gate_output
from headrace.kernels.attention.paged_attention import paged_decode, paged_prefill
from headrace.kernels.attention.prepare_qkv import prepare_qkv
from headrace.kernels.dense.fp8 import select_rows, stack_rows
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.models.config import AttentionConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class AttentionNames:
    """Names of a family's attention tensors, and the form in which it stores the norms of queries and keys."""

    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    norm_offset: float = 1.0  # added to the stored weights of both norms


@dataclass(frozen=True)
class Attention:
    """An attention layer. One projection gives queries, keys, values and, if there is one, the output gate."""

    config: AttentionConfig
    index: int  # among the attention layers: the layer's place in a block
    norm_eps: float
    in_proj: LinearWeight  # [(H + 2 KV (+ H)) * D, hidden]
    out_proj: LinearWeight  # [hidden, H * D]
    qk_norm_JD: Tensor | None  # float32
    skips_first: bool = False  # decodes alone: nothing was stored at a sequence's position 0
    row_norms: tuple[Tensor, Tensor] | None = None  # [H D] and [KV D], float32
    kv_proj: LinearWeight | None = None  # keys' and values' rows of in_proj, for `store`

    @classmethod
    def load(
        cls,
        weights: WeightSource,
        prefix: str,
        config: AttentionConfig,
        index: int,
        hidden: int,
        norm_eps: float,
        names: AttentionNames = AttentionNames(),
        out_proj: LinearWeight | None = None,
    ) -> "Attention":
        """From q_proj, k_proj, v_proj and what `names` says. `out_proj`: used instead of the layer's own."""
        H, KV, D = config.num_heads, config.num_kv_heads, config.head_dim
        q_rows = 2 * H * D if config.has_output_gate else H * D
        q = weights.matrix(f"{prefix}.q_proj.weight", (q_rows, hidden))
        k = weights.matrix(f"{prefix}.k_proj.weight", (KV * D, hidden))
        v = weights.matrix(f"{prefix}.v_proj.weight", (KV * D, hidden))
        gate = []
        if config.has_output_gate:  # on disk each head's query rows are followed by its gate rows
            rows = torch.arange(q_rows).view(H, 2, D)
            q, gate = select_rows(q, rows[:, 0].flatten()), [select_rows(q, rows[:, 1].flatten())]
        qk_norm = None
        if config.has_qk_norm:
            q_norm = weights.take(f"{prefix}.{names.q_norm}.weight", (D,), torch.float32)
            k_norm = weights.take(f"{prefix}.{names.k_norm}.weight", (D,), torch.float32)
            qk_norm = names.norm_offset + torch.cat((q_norm.expand(H, D), k_norm.expand(KV, D)))
        row_norms = None
        if config.has_row_norm:
            row_norms = (
                weights.take(f"{prefix}.{names.q_norm}.weight", (H * D,), torch.float32),
                weights.take(f"{prefix}.{names.k_norm}.weight", (KV * D,), torch.float32),
            )
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=LinearWeight(stack_rows((q, k, v, *gate))),
            out_proj=out_proj or LinearWeight(weights.matrix(f"{prefix}.{names.out}.weight", (hidden, H * D))),
            qk_norm_JD=qk_norm,
            row_norms=row_norms,
        )

    def of_mtp(self) -> "Attention":
        """This layer as an MTP layer's: nothing lies at position 0, and entries may be stored alone."""
        H, KV, D = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        return replace(self, skips_first=True, kv_proj=self.in_proj.of_rows(H * D, (H + 2 * KV) * D))

    @property
    def reads(self) -> Fp8Format | None:
        return self.in_proj.reads

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        batch, n, scale = context.batch, context.batch.num_decodes, self.config.scale
        projected = self.in_proj(x)
        q, k, v = self._prepare(projected, context)
        gate = self._gate(projected)
        k_pool, v_pool = context.memory.kv_pools[self.index]
        parts = []
        assert not (self.skips_first and batch.prefill is not None)
        if batch.decode is not None:
            decode_gate = None if gate is None else gate[:n]
            rows = batch.decode.attention
            parts.append(paged_decode(q[:n], k_pool, v_pool, scale, rows, decode_gate, self.skips_first))
        if batch.prefill is not None:
            prefilled = paged_prefill(q[n:], k[n:], v[n:], k_pool, v_pool, scale, batch.prefill.attention)
            parts.append(prefilled if gate is None else gate_output(prefilled, gate[n:]))
        return Product(batch.join(parts).flatten(1), self.out_proj)

    def attend_rows(self, x: Rows, context: LayerContext, rows: Tensor) -> Product:
        """Outputs of `rows` alone: none, or those of `last_token_queries`. All keys and values go to the pool."""
        queries = context.batch.last_token_queries
        projected = self.in_proj(x)
        q, _, _ = self._prepare(projected, context)
        if queries is None:
            return Product(q.new_empty(0, self.out_proj.in_features), self.out_proj)
        k_pool, v_pool = context.memory.kv_pools[self.index]
        gate = self._gate(projected.index_select(0, rows))
        attended = paged_decode(q.index_select(0, rows), k_pool, v_pool, self.config.scale, queries, gate)
        return Product(attended.flatten(1), self.out_proj)

    def store(self, x: Rows, context: LayerContext) -> None:
        """Writes keys and values of all rows to the pool, and computes nothing else. For a layer `of_mtp`."""
        assert self.kv_proj is not None and self.row_norms is None
        norm = None if self.qk_norm_JD is None else self.qk_norm_JD[self.config.num_heads :]
        self._write(self.kv_proj(x), 0, norm, context)

    def _prepare(self, projected: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries [T, H, D], keys and values [T, KV, D]; keys and values are also in the pool."""
        if self.row_norms is not None:
            first = 0
            for norm in self.row_norms:
                rows = projected[:, first : first + len(norm)]
                rows.copy_(rms_norm(rows, norm, self.norm_eps))
                first += len(norm)
        return self._write(projected, self.config.num_heads, self.qk_norm_JD, context)

    def _write(
        self, projected: Tensor, num_heads: int, norm_JD: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `_prepare`, of rows with so many heads of queries before keys and values."""
        batch, pools = context.batch, context.memory.kv_pools[self.index]
        return prepare_qkv(
            projected, *pools, batch.block_T, batch.offset_T, num_heads, norm_JD, self.norm_eps, context.rotary
        )

    def _gate(self, projected: Tensor) -> Tensor | None:
        """The output gate [T, H, D] of the projection's rows."""
        H, D = self.config.num_heads, self.config.head_dim
        return projected[:, -H * D :].unflatten(1, (H, D)) if self.config.has_output_gate else None
