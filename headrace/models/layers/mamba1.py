"""The Mamba1 mixer of Jamba: convolution, normed projections to time steps, B and C, selective scan, gate.

    u, gate = in_proj(x);  u = silu(conv(u))
    dt, B, C = norms(x_proj(u));  y = out_proj(scan(u, dt_proj(dt), B, C, gate))

Legend    T rows, I inner size, N state size, R rank of the time steps
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.update import causal_conv1d_update
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.kernels.mamba1.channels import Mamba1Channels
from headrace.kernels.mamba1.norms import norm_parts
from headrace.kernels.mamba1.prefill import mamba1_prefill
from headrace.kernels.mamba1.update import mamba1_update
from headrace.models.config import Mamba1Config
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class Mamba1:
    """A Mamba1 layer; its state is a conv window and N numbers for each channel."""

    config: Mamba1Config
    index: int  # among the state layers: the layer's place in a state
    norm_eps: float
    in_proj: LinearWeight  # [I (convolved) + I (gate), hidden]
    conv_weight: Tensor  # [I, taps]
    conv_bias: Tensor | None
    x_proj: LinearWeight  # [R + 2 N, I]
    norms: Tensor  # [R + 2 N] float32: of the projected dt, B and C
    dt_proj: LinearWeight  # [I, R]; its bias is among the channels' parameters
    channels: Mamba1Channels
    out_proj: LinearWeight  # [hidden, I]

    @classmethod
    def load(
        cls, weights: WeightSource, prefix: str, config: Mamba1Config, index: int, hidden: int, norm_eps: float
    ) -> "Mamba1":
        """From the tensors below `prefix`."""
        inner, N, R = config.inner_size, config.state_size, config.dt_rank
        sizes = (("dt", R), ("b", N), ("c", N))
        norms = [weights.take(f"{prefix}.{name}_layernorm.weight", (size,), torch.float32) for name, size in sizes]
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=LinearWeight(weights.matrix(f"{prefix}.in_proj.weight", (2 * inner, hidden))),
            conv_weight=weights.take(f"{prefix}.conv1d.weight", (inner, 1, config.conv_taps)).squeeze(1),
            conv_bias=weights.take(f"{prefix}.conv1d.bias", (inner,)) if config.has_conv_bias else None,
            # Never in FP8: they are small, and every later state depends on the time steps.
            x_proj=LinearWeight(weights.take(f"{prefix}.x_proj.weight", (R + 2 * N, inner))),
            norms=torch.cat(norms),
            dt_proj=LinearWeight(weights.take(f"{prefix}.dt_proj.weight", (inner, R))),
            channels=Mamba1Channels(
                A=-weights.take(f"{prefix}.A_log", (inner, N), torch.float32).exp(),
                D=weights.take(f"{prefix}.D", (inner,), torch.float32),
                dt_bias=weights.take(f"{prefix}.dt_proj.bias", (inner,), torch.float32),
            ),
            out_proj=LinearWeight(weights.matrix(f"{prefix}.out_proj.weight", (hidden, inner))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return self.in_proj.reads

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        batch, n = context.batch, context.batch.num_decodes
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        conv_pool, rec_pool = context.memory.state_pools[self.index]
        u = self._convolved(u, context, conv_pool)
        dt, B, C = self._projected(u)
        parts = []
        for group in batch.decode_groups:
            rows, slots = group.rows, (group.source, group.dst_slots)
            inputs = u[rows], dt[rows], B[rows], C[rows], gate[rows]
            parts.append(mamba1_update(*inputs, self.channels, rec_pool, *slots))
        if batch.prefill is not None:
            inputs = u[n:], dt[n:], B[n:], C[n:], gate[n:]
            parts.append(mamba1_prefill(*inputs, self.channels, rec_pool, batch.prefill.segments))
        return Product(batch.join(parts), self.out_proj)

    def _convolved(self, u: Tensor, context: LayerContext, conv_pool: Tensor) -> Tensor:
        batch, n = context.batch, context.batch.num_decodes
        parts = []
        for group in batch.decode_groups:
            slots = group.source, group.dst_slots
            parts.append(causal_conv1d_update(u[group.rows], self.conv_weight, self.conv_bias, conv_pool, *slots))
        if batch.prefill is not None:
            segments = batch.prefill.segments
            parts.append(causal_conv1d(u[n:], self.conv_weight, self.conv_bias, conv_pool, segments))
        return batch.join(parts)

    def _projected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Time steps [T, I], raw, and B and C [T, N]."""
        c = self.config
        normed = norm_parts(self.x_proj(u), self.norms, c.dt_rank, self.norm_eps)
        dt, B, C = normed.split((c.dt_rank, c.state_size, c.state_size), dim=-1)
        return self.dt_proj(dt), B, C
