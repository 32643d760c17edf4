"""The gated short convolution of LFM2: a state that is a conv window alone.

    B, C, u = in_proj(x)          y = out_proj(C * conv(B * u))

Legend    T rows, hidden channels
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.update import causal_conv1d_update
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.models.config import ShortConvConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class ShortConv:
    """A short convolution without activation, between a gate before it and one behind it."""

    index: int  # among the state layers: the layer's place in a state
    in_proj: LinearWeight  # [3 hidden (gate before, gate behind, convolved), hidden]
    conv_weight: Tensor  # [hidden, taps]
    out_proj: LinearWeight  # [hidden, hidden]

    @classmethod
    def load(cls, weights: WeightSource, prefix: str, config: ShortConvConfig, index: int) -> "ShortConv":
        hidden = config.conv_channels
        return cls(
            index=index,
            in_proj=LinearWeight(weights.matrix(f"{prefix}.in_proj.weight", (3 * hidden, hidden))),
            conv_weight=weights.take(f"{prefix}.conv.weight", (hidden, 1, config.conv_taps)).squeeze(1),
            out_proj=LinearWeight(weights.matrix(f"{prefix}.out_proj.weight", (hidden, hidden))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return self.in_proj.reads

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        batch, n = context.batch, context.batch.num_decodes
        before, behind, inner = self.in_proj(x).chunk(3, dim=-1)
        u, windows = before * inner, context.memory.state_pools[self.index].conv
        parts = []
        for group in batch.decode_groups:
            slots = group.source, group.dst_slots
            parts.append(causal_conv1d_update(u[group.rows], self.conv_weight, None, windows, *slots, silu=False))
        if batch.prefill is not None:
            segments = batch.prefill.segments
            parts.append(causal_conv1d(u[n:], self.conv_weight, None, windows, segments, silu=False))
        return Product(behind * batch.join(parts), self.out_proj)
