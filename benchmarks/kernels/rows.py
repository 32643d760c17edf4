"""Norms, gated norms, SwiGLU, experts and sampling on one GPU.

    python3 -m benchmarks kernels-rows [--library] [--only norms ...]

`--library` adds the product apart from its addition, and torch beside our experts and draws: its grouped product with
the gathering and the SwiGLU that it needs around it, its argmax, and sampling from sorted probabilities.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.dense.gated_rms_norm import gate_then_norm_triton, norm_then_gate_triton
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product, add_branch
from headrace.kernels.dense.rms_norm import add_rms_norm_triton, rms_norm_triton
from headrace.kernels.dense.swiglu import swiglu_triton
from headrace.kernels.moe.experts import moe_experts_triton
from headrace.kernels.moe.routing import moe_route_triton
from headrace.kernels.sampling.argmax import argmax_torch, argmax_triton
from headrace.kernels.sampling.draw import draw_torch, draw_triton

BF16 = torch.bfloat16
NORM_WIDTHS = {"granite-h-micro": 2048, "qwen35-4b": 2560}
GATED_WIDTH = 4096  # both: 64 heads of 64, 32 heads of 128
INNER = {"granite-h-micro": 8192, "qwen35-4b": 9216}
ROW_COUNTS = (1, 64, 256, 8192)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def norm_rows(library: bool) -> Iterator[Row]:
    for model, width in NORM_WIDTHS.items():
        weight = torch.rand(width, device="cuda")
        for count in ROW_COUNTS:
            shape, each = f"{model}, {count} x {width}", 2.0 * count * width
            yield measure("rms_norm", shape,
                          lambda: partial(rms_norm_triton, random(count, width), weight, 1e-5), 2 * each)  # noqa: B023 # fmt: skip
            yield measure("add_rms_norm", shape,
                          lambda: partial(add_rms_norm_triton, random(count, width), random(count, width), 0.22,  # noqa: B023
                                          weight, 1e-5), 4 * each)  # noqa: B023 # fmt: skip


def residual_rows(library: bool) -> Iterator[Row]:
    """A branch's last product, its addition and the norm behind; library: the product apart from its addition."""
    for model, config in SHAPES.items():
        width, weight = config.hidden_size, torch.rand(config.hidden_size, device="cuda")
        for name, inner in (("out_proj", GATED_WIDTH), ("down", config.intermediate_size)):
            for count in (128, 256, 512, 2048, 8192):
                matrix = LinearWeight(random(width, inner) * inner**-0.5)

                def added(x: Tensor, y: Tensor) -> object:
                    return add_branch(x, Product(y, matrix), 0.22, weight, 1e-5)  # noqa: B023

                def apart(x: Tensor, y: Tensor) -> object:
                    return add_rms_norm_triton(x, matrix(y), 0.22, weight, 1e-5)  # noqa: B023

                for kind, run in (("added", added), ("apart", apart))[: 1 + library]:
                    yield measure(f"{name}, norm: {kind}", f"{model}, {count} rows",
                                  lambda: partial(run, random(count, width), random(count, inner)),  # noqa: B023
                                  2.0 * (width * inner + count * (inner + 4 * width)),
                                  2.0 * count * width * inner)  # fmt: skip


def gated_rows(library: bool) -> Iterator[Row]:
    def before(count: int) -> Callable[[], object]:
        """Mamba2's: the gate is a slice of the projection, 8,512 wide."""
        weight, gate = torch.rand(GATED_WIDTH, device="cuda"), random(count, 8512)[:, :GATED_WIDTH]
        return partial(gate_then_norm_triton, random(count, GATED_WIDTH), gate, weight, 1e-5, 1)

    def behind(count: int) -> Callable[[], object]:
        """The gated delta net's, in a projection 12,352 wide."""
        gate = random(count, 12352)[:, 8192:12288].view(count, 32, 128)
        return partial(norm_then_gate_triton, random(count, 32, 128), gate, torch.rand(128, device="cuda"), 1e-6)

    for count in ROW_COUNTS:
        num_bytes = 6.0 * count * GATED_WIDTH
        for name, shape, prepare in (
            ("gate_then_norm", f"granite-h-micro, {count} rows", partial(before, count)),
            ("norm_then_gate", f"qwen35-4b, {count} rows", partial(behind, count)),
        ):
            yield measure(name, shape, prepare, num_bytes)


def swiglu_rows(library: bool) -> Iterator[Row]:
    for model, inner in INNER.items():
        for count in ROW_COUNTS:
            prepare = lambda: partial(swiglu_triton, random(count, 2 * inner))  # noqa: B023, E731
            yield measure("swiglu", f"{model}, {count} x {inner}", prepare, 6.0 * count * inner)


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer."""

    name: str
    num_experts: int
    chosen: int
    hidden: int
    inner: int

    def matrices(self) -> tuple[Tensor, Tensor]:
        gate_up = random(self.num_experts, 2 * self.inner, self.hidden) * self.hidden**-0.5
        return gate_up, random(self.num_experts, self.hidden, self.inner) * self.inner**-0.5

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, expert, weight: other experts each time."""
        expert = torch.rand(count, self.num_experts, device="cuda").argsort(-1)[:, : self.chosen].int()
        return random(count, self.hidden), expert, random(count, self.chosen)

    def flops(self, count: int) -> float:
        return 6.0 * count * self.chosen * self.hidden * self.inner

    def num_bytes(self, count: int) -> float:
        """Weights of the experts that are chosen at all, each once; x and y."""
        share = 1 - (1 - self.chosen / self.num_experts) ** count
        return 6.0 * self.num_experts * share * self.hidden * self.inner + 4.0 * count * self.hidden


MIXTURES = (
    Mixture("qwen3.5-35b-a3b", 256, 8, 2048, 512),
    Mixture("granite-4.0-h-tiny", 64, 6, 1536, 512),
)
MOE_COUNTS = (1, 16, 64, 256, 8192)


def moe_rows(library: bool) -> Iterator[Row]:
    for mixture in MIXTURES:
        matrices = mixture.matrices()
        for count in MOE_COUNTS:
            runs: dict[str, Callable[..., Tensor]] = {"experts": moe_experts_triton}
            if library:
                runs["torch's grouped product"] = grouped_mm
            for name, run in runs.items():
                prepare = lambda: partial(run, *mixture.rows(count), *matrices)  # noqa: B023, E731
                yield measure(name, f"{mixture.name}, {count} rows", prepare, mixture.num_bytes(count),
                              mixture.flops(count))  # fmt: skip
            yield route_row(mixture, count)


def route_row(mixture: Mixture, count: int) -> Row:
    def prepare() -> Callable[[], object]:
        logits = torch.randn(count, mixture.num_experts, device="cuda")
        return partial(moe_route_triton, logits, mixture.chosen, True)

    num_bytes = count * (4.0 * mixture.num_experts + 8.0 * mixture.chosen)
    return measure("route", f"{mixture.name}, {count} rows", prepare, num_bytes)


def grouped_mm(x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    chosen, order = expert.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(gate_up), device=x.device), right=True).int()
    rows = x.index_select(0, order // expert.shape[1])
    hidden = swiglu_triton(torch._grouped_mm(rows, gate_up.transpose(1, 2), ends))
    out = torch._grouped_mm(hidden, down.transpose(1, 2), ends)
    scaled = torch.empty_like(out).index_copy_(0, order, out * weight.flatten()[order, None])
    return scaled.view(*expert.shape, -1).sum(1)


def draw_rows(library: bool) -> Iterator[Row]:
    """Logits as a bf16 head leaves them. The floor reads them once."""
    for model, config in SHAPES.items():
        for count in (1, 16, 64, 256):
            uniform = torch.rand(count, device="cuda", dtype=torch.float64)
            place = torch.empty(count, device="cuda", dtype=torch.int64)
            choices: dict[str, Callable[[Tensor], object]] = {"argmax": partial(argmax_triton, out=place)}
            if library:
                choices["argmax, torch's"] = partial(argmax_torch, out=place)
            for name, setting in (("", (1.0, 0, 1.0, 0.0)), (", top_k 50, top_p 0.9", (0.7, 50, 0.9, 0.0))):
                drawn = {"settings_N4": torch.tensor([setting] * count, device="cuda", dtype=torch.float64),
                         "uniform_N": uniform}  # fmt: skip
                choices[f"draw{name}"] = partial(draw_triton, **drawn)
                if library:
                    choices[f"draw{name}, by sorting"] = partial(draw_torch, **drawn)
            for name, run in choices.items():
                prepare = lambda: partial(run, random(count, config.vocab_size).mul_(3).float())  # noqa: B023, E731
                yield measure(name, f"{model}, {count} rows", prepare, 4.0 * count * config.vocab_size)


KINDS = {
    "norms": norm_rows,
    "residual": residual_rows,
    "gated": gated_rows,
    "swiglu": swiglu_rows,
    "experts": moe_rows,
    "draw": draw_rows,
}
main = kernel_command(KINDS, "Norms, gated norms, SwiGLU, experts and sampling.")
