"""The Kimi-delta-attention mixer: convolution, delta rule with a decay for each key channel, gated norm.

Legend    T rows, H heads, D their dim
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.forward.forward_batch import DecodeGroup, LayerContext
from headrace.forward.memory import CacheMemory
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.update import causal_conv1d_update
from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.gated_rms_norm import norm_then_gate_rows
from headrace.kernels.dense.linear import LinearWeight, read_by
from headrace.kernels.dense.residual import Product
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.prefill import kda_prefill
from headrace.kernels.kda.update import kda_update
from headrace.kernels.lib.segments import PrefillSegments
from headrace.models.config import KimiDeltaConfig
from headrace.models.layers.gated_delta import join_projections
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class KimiDelta:
    """A Kimi-delta-attention layer; its state is a conv window and a matrix for each head."""

    config: KimiDeltaConfig
    index: int  # among the state layers: the layer's place in a state
    norm_eps: float
    in_proj: LinearWeight  # [3 H D (convolved: q, k, v) + D (decay) + D (gate) + H (beta), hidden]
    gates: LinearWeight | None  # the last three apart from an in_proj in FP8; None: a part of it
    conv_weight: Tensor  # [3 H D, taps]
    decay_proj: LinearWeight  # [H D, D]
    gate_proj: LinearWeight  # [H D, D]
    heads: KdaHeads
    norm_D: Tensor  # float32
    out_proj: LinearWeight  # [hidden, H D]

    @classmethod
    def load(
        cls, weights: WeightSource, prefix: str, config: KimiDeltaConfig, index: int, hidden: int, norm_eps: float
    ) -> "KimiDelta":
        """From a matrix for each of q, k, v, the gates' two factors each, and beta."""
        H, D, inner = config.num_heads, config.head_dim, config.inner_size
        qkv = [weights.matrix(f"{prefix}.{n}_proj.weight", (inner, hidden)) for n in ("q", "k", "v")]
        gates = [weights.take(f"{prefix}.{n}_proj.weight", (r, hidden)) for n, r in (("f_a", D), ("g_a", D), ("b", H))]
        in_proj, apart = join_projections(stack_rows(qkv), torch.cat(gates))
        convolutions = [
            weights.take(f"{prefix}.{n}_conv1d.weight", (inner, 1, config.conv_taps)) for n in ("q", "k", "v")
        ]
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=in_proj,
            gates=apart,
            conv_weight=torch.cat(convolutions).squeeze(1),
            decay_proj=LinearWeight(weights.matrix(f"{prefix}.f_b_proj.weight", (inner, D))),
            gate_proj=LinearWeight(weights.matrix(f"{prefix}.g_b_proj.weight", (inner, D))),
            heads=KdaHeads(
                A=-weights.take(f"{prefix}.A_log", (1, 1, H, 1), torch.float32).flatten().exp(),
                dt_bias=weights.take(f"{prefix}.dt_bias", (inner,), torch.float32).view(H, D),
            ),
            norm_D=weights.take(f"{prefix}.o_norm.weight", (D,), torch.float32),
            out_proj=LinearWeight(weights.matrix(f"{prefix}.o_proj.weight", (hidden, inner))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return read_by(self.in_proj, self.gates)

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        c, batch, n = self.config, context.batch, context.batch.num_decodes
        if self.gates is None:
            u = self.in_proj(x)
            gates = u[:, c.conv_channels :]
        else:
            u, gates = self.in_proj.beside(x, self.gates)
        u, (decay, gate, b) = u[:, : c.conv_channels], gates.split((c.head_dim, c.head_dim, c.num_heads), dim=-1)
        f, gate = self._by_head(self.decay_proj(decay)), self._by_head(self.gate_proj(gate))
        parts = [
            self._decode(u[group.rows], f[group.rows], b[group.rows], group, context.memory)
            for group in batch.decode_groups
        ]
        if batch.prefill is not None:
            parts.append(self._prefill(u[n:], f[n:], b[n:], batch.prefill.segments, context.memory))
        o_THD, reads = batch.join(parts), self.out_proj.reads
        rows = norm_then_gate_rows(o_THD, gate, self.norm_D, self.norm_eps, reads, sigmoid=True)
        return Product(rows, self.out_proj)

    def _decode(self, u: Tensor, f: Tensor, b: Tensor, group: DecodeGroup, memory: CacheMemory) -> Tensor:
        conv_pool, rec_pool = memory.state_pools[self.index]
        u = causal_conv1d_update(u, self.conv_weight, None, conv_pool, group.source, group.dst_slots)
        return kda_update(*self._qkv(u), f, b, self.heads, rec_pool, group.source, group.dst_slots)

    def _prefill(self, u: Tensor, f: Tensor, b: Tensor, segments: PrefillSegments, memory: CacheMemory) -> Tensor:
        conv_pool, rec_pool = memory.state_pools[self.index]
        u = causal_conv1d(u, self.conv_weight, None, conv_pool, segments)
        return kda_prefill(*self._qkv(u), f, b, self.heads, rec_pool, segments)

    def _qkv(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = u.chunk(3, dim=-1)
        return self._by_head(q), self._by_head(k), self._by_head(v)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.config.num_heads, self.config.head_dim)
