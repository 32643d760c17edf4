"""Feed-forwards: dense, and mixtures of experts beside a shared expert; SwiGLU, or without a gate."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.kernels.dense.float32_linear import Float32Linear
from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows, plain_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product
from headrace.kernels.moe.experts import Experts, experts_of, moe_experts
from headrace.kernels.moe.outputs import Shared, sum_outputs
from headrace.kernels.moe.routing import moe_route
from headrace.kernels.moe.sigmoid_routing import TINY, SigmoidRouting, moe_route_sigmoid
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
        gate = weights.matrix(f"{prefix}.gate_proj.weight", (intermediate, hidden))
        up = weights.matrix(f"{prefix}.up_proj.weight", (intermediate, hidden))
        down = weights.matrix(f"{prefix}.down_proj.weight", (hidden, intermediate))
        return cls(LinearWeight(stack_rows((gate, up))), LinearWeight(down))

    @property
    def reads(self) -> Fp8Format | None:
        return self.gate_up.reads

    def __call__(self, x: Rows) -> Product:
        return Product(self.gate_up.swiglu(x, self.down.reads), self.down)

    def parts(self, x: Rows) -> Tensor:
        """The output itself, or parts of it: `LinearWeight.parts`."""
        return self.down.parts(self.gate_up.swiglu(x, self.down.reads))


@dataclass(frozen=True)
class ReluSquared:
    """A dense feed-forward without a gate: down(max(up(x), 0)^2)."""

    up: LinearWeight  # [I, hidden]
    down: LinearWeight  # [hidden, I]

    @classmethod
    def load(cls, weights: WeightSource, prefix: str, hidden: int, intermediate: int) -> "ReluSquared":
        """From up_proj and down_proj."""
        up = weights.matrix(f"{prefix}.up_proj.weight", (intermediate, hidden))
        return cls(LinearWeight(up), LinearWeight(weights.matrix(f"{prefix}.down_proj.weight", (hidden, intermediate))))

    @property
    def reads(self) -> Fp8Format | None:
        return self.up.reads

    def __call__(self, x: Rows) -> Product:
        return Product(self.up.relu_squared(x, self.down.reads), self.down)

    def parts(self, x: Rows) -> Tensor:
        """The output itself, or parts of it: `LinearWeight.parts`."""
        return self.down.parts(self.up.relu_squared(x, self.down.reads))


class Router(Protocol):
    """The choice of each row's experts: weight [T, k] and expert [T, k]."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class SoftmaxRouter:
    matrix: LinearWeight  # [E, hidden]
    k: int
    renormalize: bool

    @classmethod
    def of(cls, config: MoeConfig, matrix: Tensor) -> "SoftmaxRouter":
        # Qwen's softmax over all, then top k, then renormalised, is Granite's softmax over the top k.
        return cls(
            LinearWeight(matrix), config.experts_per_token, config.renormalize or config.router == "top_k_then_softmax"
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moe_route(self.matrix(x), self.k, self.renormalize)


@dataclass(frozen=True)
class SigmoidRouter:
    matrix: Float32Linear  # [E, hidden]: scores are compared with each other and with small biases
    bias: Tensor | None  # [E] float32
    routing: SigmoidRouting

    @classmethod
    def of(cls, config: MoeConfig, matrix: Tensor, bias: Tensor | None, smallest: float = TINY) -> "SigmoidRouter":
        """`smallest`: see `SigmoidRouting`."""
        k, groups, chosen = config.experts_per_token, config.num_groups, config.chosen_groups
        routing = SigmoidRouting(k, config.renormalize, groups, chosen, config.scale, smallest)
        return cls(Float32Linear(matrix), bias, routing)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moe_route_sigmoid(self.matrix(x), self.bias, self.routing)


@dataclass(frozen=True)
class Latent:
    """Projections to and from the smaller space of routed experts."""

    enter: LinearWeight  # [latent, hidden]
    leave: LinearWeight  # [hidden, latent]


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed experts, E of them with inner size I and inputs of D values, maybe beside a shared one for every row."""

    router: Router
    up: Experts  # [E, 2 I, D], gate rows first; without a gate [E, I, D]
    down: Experts  # [E, D, I]
    shared: SwiGlu | ReluSquared | None
    shared_gate: Tensor | None = None  # [1, hidden]
    latent: Latent | None = None  # None: D is hidden

    @property
    def reads(self) -> Fp8Format | None:
        """The shared expert's; the router reads rows in 16 bits, and routed experts quantise these."""
        shared = None if self.shared is None else self.shared.reads
        return None if shared is None else shared._replace(keeps_plain=True)

    def __call__(self, x: Rows) -> Tensor:
        plain = plain_rows(x)
        weight, expert = self.router(plain)
        inputs = plain if self.latent is None else self.latent.enter(plain)
        outputs = moe_experts(inputs, expert, weight, self.up, self.down)
        if self.latent is not None:
            outputs = self.latent.leave(sum_outputs(outputs))[:, None]
        if self.shared is None:
            return sum_outputs(outputs)
        return sum_outputs(outputs, Shared(self.shared.parts(x), plain, self.shared_gate))


def load_swiglu_experts(
    weights: WeightSource, prefix: str, num_experts: int, inner: int, size: int, names: tuple[str, str, str]
) -> tuple[Experts, Experts]:
    """[E, 2 inner, size] and [E, size, inner] from a matrix for each expert; `names` are gate's, up's and down's."""
    gate, up, down = names
    gate_up = [
        weights.matrix(f"{prefix}.{expert}.{name}.weight", (inner, size))
        for expert in range(num_experts)
        for name in (gate, up)
    ]
    downs = [weights.matrix(f"{prefix}.{expert}.{down}.weight", (size, inner)) for expert in range(num_experts)]
    return experts_of(stack_rows(gate_up), num_experts), experts_of(stack_rows(downs), num_experts)
