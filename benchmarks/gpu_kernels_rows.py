"""Norms, gated norms, SwiGLU, experts and sampling on one GPU.

    python -m benchmarks.gpu_kernels_rows [--variants] [--only norms residual gated swiglu experts draw]
    python -m benchmarks.gpu_kernels_rows --compile-only

Times as in benchmarks/gpu_timing.py. `--variants` adds other tiles, and the library beside our experts and draws:
torch's grouped product, with the gathering and the SwiGLU that it needs around it, its argmax, and sampling from sorted
probabilities.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from benchmarks.gpu_kinds import main
from benchmarks.gpu_timing import Row, measure
from benchmarks.shapes import SHAPES
from headrace.kernels.dense import gated_rms_norm
from headrace.kernels.dense.gated_rms_norm import gate_then_norm_triton, gated_tile, norm_then_gate_triton
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product, add_branch
from headrace.kernels.dense.rms_norm import add_rms_norm_triton, rms_norm_triton, row_tile
from headrace.kernels.dense.swiglu import swiglu_triton
from headrace.kernels.moe.experts import MoeTile, moe_experts_triton, moe_tile
from headrace.kernels.moe.routing import moe_route_triton
from headrace.kernels.sampling.argmax import argmax_torch, argmax_triton
from headrace.kernels.sampling.draw import draw_torch, draw_triton
from tests.support.kernels.compiled import Launch

BF16 = torch.bfloat16
NORM_WIDTHS = {"granite-h-micro": 2048, "qwen35-4b": 2560}
GATED_VARIANTS = {"gate_then_norm": [(1, 8)], "norm_then_gate": [(4, 4), (8, 4)]}
GATED_WIDTH = 4096  # both: 64 heads of 64, 32 heads of 128
INNER = {"granite-h-micro": 8192, "qwen35-4b": 9216}
ROW_COUNTS = (1, 64, 256, 8192)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def norm_rows(_variants: bool) -> Iterator[Row]:
    for model, width in NORM_WIDTHS.items():
        weight = torch.rand(width, device="cuda")
        for count in ROW_COUNTS:
            shape, each = f"{model}, {count} x {width}", 2.0 * count * width
            yield measure("rms_norm", shape,
                          lambda: partial(rms_norm_triton, random(count, width), weight, 1e-5), 2 * each)  # noqa: B023 # fmt: skip
            yield measure("add_rms_norm", shape,
                          lambda: partial(add_rms_norm_triton, random(count, width), random(count, width), 0.22,  # noqa: B023
                                          weight, 1e-5), 4 * each)  # noqa: B023 # fmt: skip


def residual_rows(variants: bool) -> Iterator[Row]:
    """A branch's last product, its addition and the norm behind; variants: the product apart from its addition."""
    for model, config in SHAPES.items():
        width, weight = config.hidden_size, torch.rand(config.hidden_size, device="cuda")
        for name, inner in (("out_proj", GATED_WIDTH), ("down", config.intermediate_size)):
            for count in (128, 256, 512, 2048, 8192):
                matrix = LinearWeight(random(width, inner) * inner**-0.5)

                def added(x: Tensor, y: Tensor) -> object:
                    return add_branch(x, Product(y, matrix), 0.22, weight, 1e-5)  # noqa: B023

                def apart(x: Tensor, y: Tensor) -> object:
                    return add_rms_norm_triton(x, matrix(y), 0.22, weight, 1e-5)  # noqa: B023

                for kind, run in (("added", added), ("apart", apart))[: 1 + variants]:
                    yield measure(f"{name}, norm: {kind}", f"{model}, {count} rows",
                                  lambda: partial(run, random(count, width), random(count, inner)),  # noqa: B023
                                  2.0 * (width * inner + count * (inner + 4 * width)),
                                  2.0 * count * width * inner)  # fmt: skip


def gated_rows(variants: bool) -> Iterator[Row]:
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
            for tile in GATED_VARIANTS[name] if variants else ():
                with patch.object(gated_rms_norm, "gated_tile", lambda *_: tile):  # noqa: B023
                    yield measure(f"{name} {tile}", shape, prepare, num_bytes)


def swiglu_rows(variants: bool) -> Iterator[Row]:
    tiles = [(2048, 4), (1024, 4), (1024, 2), (4096, 8), (8192, 8)] if variants else [(2048, 4)]
    for model, inner in INNER.items():
        for count in ROW_COUNTS:
            for tile in tiles:
                yield measure(
                    f"swiglu {tile}" if variants else "swiglu",
                    f"{model}, {count} x {inner}",
                    lambda: partial(swiglu_triton, random(count, 2 * inner), *tile),  # noqa: B023
                    6.0 * count * inner,
                )


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
MOE_VARIANTS = [(16, 32, 128, 4, 3), (16, 64, 64, 4, 4), (16, 64, 128, 4, 3), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4),
                (64, 128, 64, 8, 3), (128, 64, 64, 8, 3), (128, 128, 64, 8, 3)]  # fmt: skip


def moe_rows(variants: bool) -> Iterator[Row]:
    for mixture in MIXTURES:
        matrices = mixture.matrices()
        for count in MOE_COUNTS:
            tiles = [moe_tile(count * mixture.chosen / mixture.num_experts, BF16)]
            tiles += [MoeTile(*tile) for tile in MOE_VARIANTS] if variants else []
            runs: dict[str, Callable[..., Tensor]] = {
                f"experts {tuple(tile)}": partial(moe_experts_triton, tile=tile) for tile in tiles
            }
            if variants:
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


def draw_rows(variants: bool) -> Iterator[Row]:
    """Logits as a bf16 head leaves them. The floor reads them once."""
    for model, config in SHAPES.items():
        for count in (1, 16, 64, 256):
            uniform = torch.rand(count, device="cuda", dtype=torch.float64)
            place = torch.empty(count, device="cuda", dtype=torch.int64)
            choices: dict[str, Callable[[Tensor], object]] = {"argmax": partial(argmax_triton, out=place)}
            if variants:
                choices["argmax, torch's"] = partial(argmax_torch, out=place)
            for name, setting in (("", (1.0, 0, 1.0, 0.0)), (", top_k 50, top_p 0.9", (0.7, 50, 0.9, 0.0))):
                drawn = {"settings_N4": torch.tensor([setting] * count, device="cuda", dtype=torch.float64),
                         "uniform_N": uniform}  # fmt: skip
                choices[f"draw{name}"] = partial(draw_triton, **drawn)
                if variants:
                    choices[f"draw{name}, blocks of 16384"] = partial(draw_triton, **drawn, block=16384)
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


# ---------------------------------------------------------------- what the compiler makes of them, without a GPU


def compile_checks() -> Iterator[tuple[str, Launch]]:
    """The launches of the shapes above."""
    for model, width in NORM_WIDTHS.items():
        yield f"rms_norm {model}", norm_launch(width, False)
        yield f"add_rms_norm {model}", norm_launch(width, True)
    yield "gate_then_norm", gated_launch(1, GATED_WIDTH, GATED_WIDTH, True)
    yield "norm_then_gate", gated_launch(32, 128, 0, False)
    yield "swiglu", Launch("headrace.kernels.dense.swiglu:_swiglu_kernel",
                           {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "stride_x": "i32:16"},
                           {"INNER": 8192, "BLOCK": 2048})  # fmt: skip
    for mixture in MIXTURES:
        yield f"sort {mixture.name}", sort_launch(mixture)
        yield f"route {mixture.name}", route_launch(mixture)
        for entries in (1, 50, 500):
            tile = moe_tile(entries, BF16)
            yield f"gate_up {mixture.name} {tuple(tile)}", experts_launch(mixture, tile, "_gate_up_kernel")
            yield f"down {mixture.name} {tuple(tile)}", experts_launch(mixture, tile, "_down_kernel")


def norm_launch(width: int, has_branch: bool) -> Launch:
    rows, num_warps = row_tile(width)
    types = {"x_ptr": "*bf16:16", "weight_ptr": "*fp32:16", "out_ptr": "*bf16:16", "num_rows": "i32"}
    types |= {"stride_x": "i32:16", "stride_branch": "i32:16", "alpha": "fp32", "eps": "fp32"}
    constexprs: dict[str, object] = {"num_weights": 1, "D": width, "PARTS": int(has_branch), "ROWS": rows}
    optional = ("branch_ptr", "sum_ptr")
    if has_branch:
        types |= {name: "*bf16:16" for name in optional}
    else:
        constexprs |= {name: None for name in optional}
    constexprs["BLOCK_D"] = triton.next_power_of_2(width)
    return Launch("headrace.kernels.dense.rms_norm:_rms_norm_kernel", types, constexprs, num_warps)


def gated_launch(groups: int, width: int, weight_stride: int, gate_first: bool) -> Launch:
    rows, num_warps = gated_tile(64 * groups, width)
    types = {name: "*bf16:16" for name in ("x_ptr", "gate_ptr", "out_ptr")} | {"weight_ptr": "*fp32:16"}
    types |= {"num_rows": "i32", "stride_x": "i32:16", "stride_gate": "i32:16", "eps": "fp32"}
    constexprs = {"GROUPS": groups, "D": width, "WEIGHT_STRIDE": weight_stride, "GATE_FIRST": gate_first}
    constexprs |= {"ROWS": rows, "BLOCK_D": width}
    return Launch("headrace.kernels.dense.gated_rms_norm:_gated_norm_kernel", types, constexprs, num_warps)


def sort_launch(mixture: Mixture) -> Launch:
    types = {"expert_ptr": "*i32:16", "order_ptr": "*i32:16", "first_ptr": "*i32:16", "n": "i32"}
    return Launch("headrace.kernels.moe.experts:_sort_kernel", types, {"E": mixture.num_experts, "BLOCK": 1024})


def route_launch(mixture: Mixture) -> Launch:
    types = {"logits_ptr": "*fp32:16", "weight_ptr": "*fp32:16", "expert_ptr": "*i32:16", "stride_logits": "i32:16"}
    E, k = mixture.num_experts, mixture.chosen
    constexprs = {"E": E, "PADDED_E": triton.next_power_of_2(E), "K": k, "PADDED_K": triton.next_power_of_2(k)}
    return Launch("headrace.kernels.moe.routing:_route_kernel", types, constexprs | {"RENORMALIZE": True}, num_warps=1)


def experts_launch(mixture: Mixture, tile: MoeTile, kernel: str) -> Launch:
    is_up = kernel == "_gate_up_kernel"
    pointers = ("x_ptr", "weight_ptr", "hidden_ptr") if is_up else ("hidden_ptr", "weight_ptr", "scale_ptr", "out_ptr")
    types = {name: "*bf16:16" for name in pointers} | {"order_ptr": "*i32:16", "first_ptr": "*i32:16"}
    types |= {"stride_x": "i32:16", "choices": "i32"} if is_up else {}
    E = mixture.num_experts
    constexprs = {"E": E, "PADDED_E": triton.next_power_of_2(E), "D": mixture.hidden, "INNER": mixture.inner}
    constexprs |= {"ROWS": tile.rows, "COLUMNS": tile.columns if is_up else 2 * tile.columns, "DEPTH": tile.depth}
    return Launch(f"headrace.kernels.moe.experts:{kernel}", types, constexprs, tile.num_warps, tile.num_stages)


if __name__ == "__main__":
    main(__doc__, KINDS, compile_checks)
