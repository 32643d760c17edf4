"""The Mamba2 mixer: convolution, state-space scan, gated norm.

Legend    T rows, I = H * P inner size, H heads, P head dim, G groups, N state size
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.forward.memory import CacheMemory, LayerTail
from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.tail_update import causal_conv1d_tail_update
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows
from headrace.kernels.dense.gated_rms_norm import gate_then_norm_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.tails import Tails
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.prefill import ssd_prefill
from headrace.kernels.ssd.tail_update import SsdTail, ssd_tail_update
from headrace.models.config import Mamba2Config
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class Mamba2:
    """A Mamba2 layer; its state is a conv window and a [P, N] matrix for each head."""

    config: Mamba2Config
    index: int  # among the state layers: the layer's place in a state
    norm_eps: float
    in_proj: LinearWeight  # [I (gate) + I + 2 G N (convolved) + H (dt), hidden]
    conv_weight: Tensor  # [I + 2 G N, taps]
    conv_bias: Tensor | None
    heads: SsdHeads
    norm_I: Tensor | None  # float32; None: gated without a norm
    out_proj: LinearWeight  # [hidden, I]

    @classmethod
    def load(
        cls,
        weights: WeightSource,
        prefix: str,
        config: Mamba2Config,
        index: int,
        hidden: int,
        norm_eps: float,
        out_proj: LinearWeight | None = None,
    ) -> "Mamba2":
        """From the tensors below `prefix`. `out_proj`: used instead of the layer's own."""
        inner, H, channels = config.inner_size, config.num_heads, config.conv_channels
        conv = weights.take(f"{prefix}.conv1d.weight", (channels, 1, config.conv_taps))
        return cls(
            config=config,
            index=index,
            norm_eps=norm_eps,
            in_proj=LinearWeight(weights.matrix(f"{prefix}.in_proj.weight", (inner + channels + H, hidden))),
            conv_weight=conv.squeeze(1),
            conv_bias=weights.take(f"{prefix}.conv1d.bias", (channels,)) if config.has_conv_bias else None,
            heads=SsdHeads(
                A=-weights.take(f"{prefix}.A_log", (H,), torch.float32).exp(),
                D=weights.take(f"{prefix}.D", (H,), torch.float32),
                dt_bias=weights.take(f"{prefix}.dt_bias", (H,), torch.float32),
                dt_min=config.dt_min,
                dt_max=config.dt_max,
            ),
            norm_I=weights.take(f"{prefix}.norm.weight", (inner,), torch.float32) if config.has_norm else None,
            out_proj=out_proj or LinearWeight(weights.matrix(f"{prefix}.out_proj.weight", (hidden, inner))),
        )

    @property
    def reads(self) -> Fp8Format | None:
        return self.in_proj.reads

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        config, batch, n = self.config, context.batch, context.batch.num_decodes
        projected = self.in_proj(x)
        gate, u, dt = projected.split((config.inner_size, config.conv_channels, config.num_heads), dim=-1)
        parts = [
            self._decode(u[group.rows], dt[group.rows], group.tails, context.memory) for group in batch.decode_groups
        ]
        if batch.prefill is not None:
            parts.append(self._prefill(u[n:], dt[n:], batch.prefill.segments, context.memory))
        y = batch.join(parts).reshape(len(x), config.inner_size)
        rows = gate_then_norm_rows(y, gate, self.norm_I, self.norm_eps, config.num_groups, self.out_proj.reads)
        return Product(rows, self.out_proj)

    def new_tail(self, num_rows: int, num_places: int) -> LayerTail:
        """A ring of this layer, uninitialised."""
        c, (dtype, device) = self.config, (self.conv_weight.dtype, self.conv_weight.device)

        def entries(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(num_rows, num_places, *shape, dtype=dtype, device=device)

        rec = SsdTail(
            x=entries(c.num_heads, c.head_dim),
            B=entries(c.num_groups, c.state_size),
            dt=entries(c.num_heads, dtype=torch.float32),
        )
        return LayerTail(entries(c.conv_channels), rec)

    def write_states(self, tails: Tails, memory: CacheMemory) -> None:
        """Writes the states that the `tails` of no rows ask for."""
        c, no_u = self.config, self.conv_weight.new_empty(0, self.config.conv_channels)
        self._decode(no_u, self.conv_weight.new_empty(0, c.num_heads), tails, memory)

    def _decode(self, u: Tensor, dt: Tensor, tails: Tails, memory: CacheMemory) -> Tensor:
        (conv_pool, rec_pool), tail = memory.state_pools[self.index], memory.tails[self.index]
        assert isinstance(tail.rec, SsdTail)
        u = causal_conv1d_tail_update(u, self.conv_weight, self.conv_bias, conv_pool, tail.conv, tails)
        x, B, C = self._split(u)
        return ssd_tail_update(x, dt, B, C, self.heads, rec_pool, tail.rec, tails)

    def _prefill(self, u: Tensor, dt: Tensor, segments: PrefillSegments, memory: CacheMemory) -> Tensor:
        conv_pool, rec_pool = memory.state_pools[self.index]
        x, B, C = self._split(causal_conv1d(u, self.conv_weight, self.conv_bias, conv_pool, segments))
        return ssd_prefill(x, dt, B, C, self.heads, rec_pool, segments)

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, T = self.config, len(u)
        shared = c.num_groups * c.state_size
        x, B, C = u.split((c.inner_size, shared, shared), dim=-1)
        return (
            x.view(T, c.num_heads, c.head_dim),
            B.view(T, c.num_groups, c.state_size),
            C.view(T, c.num_groups, c.state_size),
        )
