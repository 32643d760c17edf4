"""SwiGLU feed-forwards: dense, and mixtures of experts beside a shared expert."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint import Tensors
from engine.model_config import MoeConfig
from kernels.linear import LinearWeight
from kernels.moe import moe_experts


@dataclass(frozen=True)
class SwiGlu:
    gate_up: LinearWeight  # [2 I, hidden], gate rows first
    down: LinearWeight  # [hidden, I]

    @classmethod
    def load(cls, checkpoint: Tensors, prefix: str, hidden: int, intermediate: int) -> "SwiGlu":
        """From gate_proj, up_proj and down_proj."""
        gate = checkpoint.take(f"{prefix}.gate_proj.weight", (intermediate, hidden))
        up = checkpoint.take(f"{prefix}.up_proj.weight", (intermediate, hidden))
        down = checkpoint.take(f"{prefix}.down_proj.weight", (hidden, intermediate))
        return cls(LinearWeight(torch.cat((gate, up))), LinearWeight(down))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True)
class MixtureOfExperts:
    config: MoeConfig
    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 I, hidden], gate rows first
    down: Tensor  # [E, hidden, I]
    shared: SwiGlu
    shared_gate: Tensor | None  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        weight, expert = self._route(F.linear(x, self.router).float())
        routed = moe_experts(x, expert, weight.to(x.dtype), self.gate_up, self.down)
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
        return routed + shared

    def _route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        k = self.config.experts_per_token
        if self.config.router == "top_k_then_softmax":
            chosen, expert = logits_TE.topk(k, dim=-1)
            return chosen.softmax(-1), expert
        weight, expert = logits_TE.softmax(-1).topk(k, dim=-1)
        if self.config.renormalize:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight, expert
