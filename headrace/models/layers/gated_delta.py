"""The gated-delta-net mixer: convolution, gated delta rule, gated norm.

Legend    T rows, Hk key heads, Hv value heads, Dk, Dv their dims
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.forward.memory import CacheMemory, LayerTail
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.tail_update import causal_conv1d_tail_update
from headrace.kernels.dense.fp8 import Fp8Matrix, Matrix, stack_rows
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.gated_rms_norm import norm_then_gate_rows
from headrace.kernels.dense.linear import LinearWeight, read_by
from headrace.kernels.dense.residual import Product
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.prefill import gdn_prefill
from headrace.kernels.gdn.tail_update import GdnTail, gdn_tail_update
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.tails import Tails
from headrace.models.config import GatedDeltaConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class GatedDelta:
    """A gated-delta-net layer; its state is a conv window and a matrix for each value head."""

    config: GatedDeltaConfig
    index: int  # among the state layers: the layer's place in a state
    norm_eps: float
    in_proj: LinearWeight  # [2 Hk Dk + Hv Dv (convolved) + Hv Dv (gate) + Hv (beta) + Hv (decay), hidden]
    beta_decay: LinearWeight | None  # [Hv (beta) + Hv (decay), hidden] apart from an in_proj in FP8; None: a part of it
    conv_weight: Tensor  # [2 Hk Dk + Hv Dv, taps]
    heads: GdnHeads
    norm_D: Tensor  # float32
    out_proj: LinearWeight  # [hidden, Hv Dv]

    @classmethod
    def load(
        cls,
        weights: WeightSource,
        prefix: str,
        config: GatedDeltaConfig,
        index: int,
        in_proj: Matrix,
        beta_decay: Matrix,
        norm_eps: float,
    ) -> "GatedDelta":
        """Both projections come from the family: releases split them differently."""
        Hv = config.num_value_heads
        conv = weights.take(f"{prefix}.conv1d.weight", (config.conv_channels, 1, config.conv_taps))
        joined, apart = join_projections(in_proj, beta_decay)
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=joined,
            beta_decay=apart,
            conv_weight=conv.squeeze(1),
            heads=GdnHeads(
                A=-weights.take(f"{prefix}.A_log", (Hv,), torch.float32).exp(),
                dt_bias=weights.take(f"{prefix}.dt_bias", (Hv,), torch.float32),
                beta_scale=config.beta_scale,
            ),
            norm_D=weights.take(f"{prefix}.norm.weight", (config.value_dim,), torch.float32),
            out_proj=LinearWeight(weights.matrix(f"{prefix}.out_proj.weight", (in_proj.shape[1], config.value_size))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return read_by(self.in_proj, self.beta_decay)

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        config, batch, n = self.config, context.batch, context.batch.num_decodes
        T, Hv = len(x), config.num_value_heads
        if self.beta_decay is None:
            u, gate, b, a = self.in_proj(x).split((config.conv_channels, config.value_size, Hv, Hv), dim=-1)
        else:
            projected, beta_decay = self.in_proj.beside(x, self.beta_decay)
            u, gate = projected.split((config.conv_channels, config.value_size), dim=-1)
            b, a = beta_decay.split((Hv, Hv), dim=-1)
        parts = [
            self._decode(u[group.rows], a[group.rows], b[group.rows], group.tails, context.memory)
            for group in batch.decode_groups
        ]
        if batch.prefill is not None:
            parts.append(self._prefill(u[n:], a[n:], b[n:], batch.prefill.segments, context.memory))
        o_THD, gate_THD = batch.join(parts), gate.view(T, Hv, config.value_dim)
        rows = norm_then_gate_rows(o_THD, gate_THD, self.norm_D, self.norm_eps, self.out_proj.reads)
        return Product(rows, self.out_proj)

    def new_tail(self, num_rows: int, num_places: int) -> LayerTail:
        """A ring of this layer, uninitialised."""
        c, (dtype, device) = self.config, (self.conv_weight.dtype, self.conv_weight.device)

        def entries(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(num_rows, num_places, *shape, dtype=dtype, device=device)

        rec = GdnTail(
            k=entries(c.num_key_heads, c.key_dim),
            delta=entries(c.num_value_heads, c.value_dim),
            g=entries(c.num_value_heads, dtype=torch.float32),
        )
        return LayerTail(entries(c.conv_channels), rec)

    def write_states(self, tails: Tails, memory: CacheMemory) -> None:
        """Writes the states that the `tails` of no rows ask for."""
        no_gates = self.conv_weight.new_empty(0, self.config.num_value_heads)
        self._decode(self.conv_weight.new_empty(0, self.config.conv_channels), no_gates, no_gates, tails, memory)

    def _decode(self, u: Tensor, a: Tensor, b: Tensor, tails: Tails, memory: CacheMemory) -> Tensor:
        (conv_pool, rec_pool), tail = memory.state_pools[self.index], memory.tails[self.index]
        assert isinstance(tail.rec, GdnTail)
        u = causal_conv1d_tail_update(u, self.conv_weight, None, conv_pool, tail.conv, tails)
        return gdn_tail_update(*self._split(u), a, b, self.heads, rec_pool, tail.rec, tails)

    def _prefill(self, u: Tensor, a: Tensor, b: Tensor, segments: PrefillSegments, memory: CacheMemory) -> Tensor:
        conv_pool, rec_pool = memory.state_pools[self.index]
        u = causal_conv1d(u, self.conv_weight, None, conv_pool, segments)
        return gdn_prefill(*self._split(u), a, b, self.heads, rec_pool, segments)

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, T = self.config, len(u)
        q, k, v = u.split((c.key_size, c.key_size, c.value_size), dim=-1)
        return (
            q.view(T, c.num_key_heads, c.key_dim),
            k.view(T, c.num_key_heads, c.key_dim),
            v.view(T, c.num_value_heads, c.value_dim),
        )


def join_projections(in_proj: Matrix, beta_decay: Matrix) -> tuple[LinearWeight, LinearWeight | None]:
    """`GatedDelta.in_proj` and `beta_decay`: one product, unless the first alone is in FP8 (recipes leave them out)."""
    if isinstance(in_proj, Fp8Matrix) and not isinstance(beta_decay, Fp8Matrix):
        return LinearWeight(in_proj), LinearWeight(beta_decay)
    return LinearWeight(stack_rows((in_proj, beta_decay))), None
