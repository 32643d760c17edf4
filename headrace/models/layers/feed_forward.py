"""SwiGLU feed-forwards: dense, and mixtures of experts beside a shared expert."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.kernels.moe.experts import moe_experts
from headrace.kernels.moe.routing import moe_route
from headrace.models.config import MoeConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class SwiGlu:
    """A dense SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    gate_up: LinearWeight  # [2 I, hidden], gate rows first
    down: LinearWeight  # [hidden, I]

    @classmethod
    def load(cls, weights: WeightSource, prefix: str, hidden: int, intermediate: int) -> "SwiGlu":
        """From gate_proj, up_proj and down_proj."""
        gate = weights.take(f"{prefix}.gate_proj.weight", (intermediate, hidden))
        up = weights.take(f"{prefix}.up_proj.weight", (intermediate, hidden))
        down = weights.take(f"{prefix}.down_proj.weight", (hidden, intermediate))
        return cls(LinearWeight(torch.cat((gate, up))), LinearWeight(down))

    def __call__(self, x: Tensor) -> Product:
        return Product(self.gate_up.swiglu(x), self.down)

    def whole(self, x: Tensor) -> Tensor:
        """The output itself: `__call__` with the down projection applied."""
        return self.down(self.gate_up.swiglu(x))


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed SwiGLU experts, E of them with inner size I, and a shared one that sees every row."""

    config: MoeConfig
    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 I, hidden], gate rows first
    down: Tensor  # [E, hidden, I]
    shared: SwiGlu
    shared_gate: Tensor | None  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        # Qwen's softmax over all, then top k, then renormalised, is Granite's softmax over the top k.
        renormalize = self.config.renormalize or self.config.router == "top_k_then_softmax"
        weight, expert = moe_route(F.linear(x, self.router), self.config.experts_per_token, renormalize)
        routed = moe_experts(x, expert, weight.to(x.dtype), self.gate_up, self.down)
        shared = self.shared.whole(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
        return routed + shared
