"""Two mixers of one layer that read the same rows and whose outputs are added (Falcon-H1)."""

from dataclasses import dataclass

import torch

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows, plain_rows
from headrace.kernels.dense.linear import LinearWeight, read_by
from headrace.kernels.dense.residual import Product
from headrace.models.layers.attention import Attention
from headrace.models.layers.mamba2 import Mamba2


@dataclass(frozen=True)
class ParallelMixers:
    """Mamba2 beside attention. The sum of both outputs is one product of what both give their output projections.

    Both mixers were loaded with the joint `out_proj`: of their products only the inputs are of use.
    """

    state: Mamba2
    attention: Attention
    out_proj: LinearWeight  # [hidden, I (state) + H * D (attention)]

    @property
    def reads(self) -> Fp8Format | None:
        return read_by(self.state.in_proj, self.attention.in_proj)

    def __call__(self, x: Rows, context: LayerContext) -> Product:
        inputs = [plain_rows(mixer(x, context).x) for mixer in (self.state, self.attention)]
        return Product(torch.cat(inputs, dim=-1), self.out_proj)
