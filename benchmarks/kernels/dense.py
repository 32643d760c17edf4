"""Dense kernels on one GPU: products, norms, SwiGLU and sampling.

    python3 -m benchmarks kernels-products [--only chain --only some ...]
    python3 -m benchmarks kernels-rows [--only norms ...]

No weight is in the cache when it is read. `chain`: the products of a decode step in their order with the norms between,
beside the same with cuBLAS. `some`: the products of larger decode steps and of checks of drafts, by cuBLAS, for few
rows (Triton) and in one round (Hopper). `prompt`: the products of a prefill step; they are cuBLAS's, but for those that
a SwiGLU takes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure, time_us
from headrace.kernels.dense import residual
from headrace.kernels.dense.gated_rms_norm import gate_then_norm_triton, norm_then_gate_triton
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.one_round_hopper import Form, one_round_hopper
from headrace.kernels.dense.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm, rms_norm_triton
from headrace.kernels.dense.small_linear import MOST_ROWS, small_linear_triton
from headrace.kernels.dense.swiglu import swiglu_triton
from headrace.kernels.dense.swiglu_linear_hopper import swiglu_linear_hopper
from headrace.kernels.sampling.argmax import argmax_triton
from headrace.kernels.sampling.draw import draw_triton
from headrace.kernels.sampling.widen import widened_triton
from headrace.models.config import KimiDeltaConfig, Mamba1Config, Mamba2Config, ModelConfig, ShortConvConfig

NORM_WIDTHS = {model: config.hidden_size for model, config in SHAPES.items()}
GATED_WIDTH = 4096  # both: 64 heads of 64, 32 heads of 128
CHAIN_LAYERS, PROMPT_ROWS = 10, 8192


@dataclass(frozen=True)
class Product:
    """A weight of O outputs and I inputs; `form` is what follows the product."""

    name: str
    O: int  # noqa: E741
    I: int  # noqa: E741
    form: Form

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.O * self.I


def products(config: ModelConfig) -> list[Product]:
    """A model's products, each once."""
    hidden, state, attention = config.hidden_size, config.state, config.attention
    if isinstance(state, Mamba2Config):
        inner, state_rows = state.inner_size, state.inner_size + state.conv_channels + state.num_heads
    elif isinstance(state, Mamba1Config):
        inner, state_rows = state.inner_size, 2 * state.inner_size
    elif isinstance(state, ShortConvConfig):
        inner, state_rows = hidden, 3 * hidden
    elif isinstance(state, KimiDeltaConfig):
        inner, state_rows = state.inner_size, state.conv_channels + 2 * state.head_dim + state.num_heads
    else:
        inner, state_rows = state.value_size, state.conv_channels + state.value_size + 2 * state.num_value_heads
    queries = attention.num_heads * attention.head_dim
    qkv = queries * (2 if attention.has_output_gate else 1) + 2 * attention.num_kv_heads * attention.head_dim
    return [
        Product("in_proj", state_rows, hidden, "plain"),
        Product("out_proj", hidden, inner, "parts"),
        Product("gate_up", 2 * config.intermediate_size, hidden, "gated"),
        Product("down", hidden, config.intermediate_size, "parts"),
        Product("qkv", qkv, hidden, "plain"),
        Product("o", hidden, queries, "parts"),
        Product("head", config.vocab_size, hidden, "plain"),
    ]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@functools.cache
def ones(width: int) -> Tensor:
    return torch.ones(width, device="cuda")


def state_stand_in(projected: Tensor, width: int) -> Tensor:
    """Three small kernels, each of which waits for the one before it, in place of convolution, state and gated norm."""
    rows, norm = projected[:, :width], ones(width)
    for _ in range(3):
        rows = rms_norm(rows, norm, 1e-5)
    return rows


def cublas_layer(x: Tensor, normed: Tensor, weights: list[Tensor], norm: Tensor) -> tuple[Tensor, Tensor]:
    in_proj, out_proj, gate_up, down = weights
    mixed = F.linear(state_stand_in(F.linear(normed, in_proj), out_proj.shape[1]), out_proj)
    x, normed = add_rms_norm(x, mixed, 0.22, norm, 1e-5)
    return add_rms_norm(x, F.linear(swiglu_triton(F.linear(normed, gate_up)), down), 0.22, norm, 1e-5)


def own_layer(x: Tensor, normed: Tensor, weights: list[LinearWeight], norm: Tensor) -> tuple[Tensor, Tensor]:
    in_proj, out_proj, gate_up, down = weights
    mixed = out_proj.parts(state_stand_in(in_proj(normed), out_proj.in_features))
    x, normed = add_rms_norm(x, mixed, 0.22, norm, 1e-5)
    return add_rms_norm(x, down.parts(gate_up.swiglu(normed)), 0.22, norm, 1e-5)


def layer_us(layer: Callable, weights: list, x: Tensor, norm: Tensor) -> float:
    """Microseconds of one of several layers in a row."""

    def run() -> None:
        stream, normed = x, x
        for each in weights:
            stream, normed = layer(stream, normed, each, norm)

    return time_us([run]) / len(weights)


def chain_rows() -> Iterator[Row]:
    """Layers of two norms and four products; the time is a layer's."""
    for model, config in SHAPES.items():
        of_layer = products(config)[:4]
        matrices = [[random(p.O, p.I) * p.I**-0.5 for p in of_layer] for _ in range(CHAIN_LAYERS)]
        own = [[LinearWeight(weight) for weight in layer] for layer in matrices]
        norm = torch.rand(config.hidden_size, device="cuda")
        num_bytes = sum(p.num_bytes for p in of_layer)
        for count in (1, 16, 64):
            x, shape = random(count, config.hidden_size), f"{model}, {count} rows"
            yield Row("chain, cuBLAS", shape, layer_us(cublas_layer, matrices, x, norm), num_bytes)
            yield Row("chain", shape, layer_us(own_layer, own, x, norm), num_bytes)


def some_rows() -> Iterator[Row]:
    """Products by each kernel that could take them."""
    for model, config in SHAPES.items():
        for product in products(config)[:-1]:
            for count in (1, 16, 32, 64, 128, 192):
                yield from some_rows_of(model, product, count)


def some_rows_of(model: str, product: Product, count: int) -> Iterator[Row]:
    kernels: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cuBLAS": cublas_swiglu if product.form == "gated" else F.linear,
        "one round": partial(one_round_hopper, form=product.form),
    }
    if count <= MOST_ROWS:
        kernels["few rows"] = partial(small_linear_triton, form=product.form)
    for name, run in kernels.items():
        yield product_row(f"{product.name}, {name}", model, product, run, count)


def prompt_rows() -> Iterator[Row]:
    """Products of a chunk: the matrix rate that prefill is charged with, shape by shape."""
    for model, config in SHAPES.items():
        for product in products(config)[:-1]:  # few rows have logits
            if product.form == "gated":
                yield product_row(f"{product.name} cuBLAS", model, product, cublas_swiglu, PROMPT_ROWS)
                yield product_row(f"{product.name} Hopper", model, product, swiglu_linear_hopper, PROMPT_ROWS)
            else:
                yield product_row(f"{product.name} cuBLAS", model, product, F.linear, PROMPT_ROWS)


def product_row(name: str, model: str, product: Product, run: Callable[[Tensor, Tensor], Tensor], count: int) -> Row:
    def prepare() -> Callable[[], object]:
        return partial(run, random(count, product.I), random(product.O, product.I))

    num_outputs = product.O // 2 if product.form == "gated" else product.O
    num_bytes = product.num_bytes + 2.0 * count * (product.I + num_outputs)
    return measure(name, f"{model}, {count:,} rows", prepare, num_bytes, 2.0 * count * product.I * product.O)


def cublas_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu_triton(F.linear(x, weight))


def norm_rows(model: str, count: int) -> Iterator[Row]:
    width = NORM_WIDTHS[model]
    weight, shape, tensor_bytes = torch.rand(width, device="cuda"), f"{model}, {count} x {width}", 2.0 * count * width

    def norm() -> Callable[[], object]:
        return partial(rms_norm_triton, random(count, width), weight, 1e-5)

    def add_norm() -> Callable[[], object]:
        return partial(add_rms_norm_triton, random(count, width), random(count, width), 0.22, weight, 1e-5)

    yield measure("rms_norm", shape, norm, 2 * tensor_bytes)
    yield measure("add_rms_norm", shape, add_norm, 4 * tensor_bytes)


def residual_rows(model: str, count: int) -> Iterator[Row]:
    """A branch's last product, its addition and the norm behind."""
    width, inner_widths = NORM_WIDTHS[model], {"out_proj": GATED_WIDTH, "down": SHAPES[model].intermediate_size}
    norm = torch.rand(width, device="cuda")
    for name, inner in inner_widths.items():
        weight = LinearWeight(random(width, inner) * inner**-0.5)

        def add(x: Tensor, y: Tensor, weight: LinearWeight = weight) -> object:
            return residual.add_branch(x, residual.Product(y, weight), 0.22, norm, 1e-5)

        def prepare(add: Callable = add, inner: int = inner) -> Callable[[], object]:
            return partial(add, random(count, width), random(count, inner))

        num_bytes = 2.0 * (width * inner + count * (inner + 4 * width))
        yield measure(f"{name}, norm", f"{model}, {count} rows", prepare, num_bytes, 2.0 * count * width * inner)


def gated_rows(model: str, count: int) -> Iterator[Row]:
    """Mamba2's gate is a slice of a projection 8,512 wide, the gated delta net's of one 12,352 wide."""

    def gate_first() -> Callable[[], object]:
        weight, gate = torch.rand(GATED_WIDTH, device="cuda"), random(count, 8512)[:, :GATED_WIDTH]
        return partial(gate_then_norm_triton, random(count, GATED_WIDTH), gate, weight, 1e-5, 1)

    def norm_first() -> Callable[[], object]:
        gate = random(count, 12352)[:, 8192:12288].view(count, 32, 128)
        return partial(norm_then_gate_triton, random(count, 32, 128), gate, torch.rand(128, device="cuda"), 1e-6)

    is_mamba = isinstance(SHAPES[model].state, Mamba2Config)
    name, prepare = ("gate_then_norm", gate_first) if is_mamba else ("norm_then_gate", norm_first)
    yield measure(name, f"{model}, {count} rows", prepare, 6.0 * count * GATED_WIDTH)


def swiglu_rows(model: str, count: int) -> Iterator[Row]:
    inner = SHAPES[model].intermediate_size
    prepare = lambda: partial(swiglu_triton, random(count, 2 * inner))  # noqa: E731
    yield measure("swiglu", f"{model}, {count} x {inner}", prepare, 6.0 * count * inner)


def draw_rows(model: str, count: int) -> Iterator[Row]:
    """Logits as a bf16 head leaves them, and in float32 where random draws read them. The floor of all but the widening
    reads them once."""
    width, shape = SHAPES[model].vocab_size, f"{model}, {count} rows"

    def rows() -> Tensor:
        return random(count, width).mul_(3)

    best = torch.empty(count, device="cuda", dtype=torch.int64)
    yield measure("argmax", shape, lambda: partial(argmax_triton, rows(), best), 2.0 * count * width)
    yield measure("widen", shape, lambda: partial(widened_triton, rows(), 6.0), 6.0 * count * width)
    uniform = torch.rand(count, device="cuda", dtype=torch.float64)
    for name, setting in (("draw", (1.0, 0, 1.0, 0.0)), ("draw, top_k 50, top_p 0.9", (0.7, 50, 0.9, 0.0))):
        settings = torch.tensor([setting] * count, device="cuda", dtype=torch.float64)
        prepare = lambda settings=settings: partial(draw_triton, rows().float(), settings, uniform)  # noqa: E731
        yield measure(name, shape, prepare, 4.0 * count * width)


def by_size(rows: Callable[[str, int], Iterator[Row]], counts: Sequence[int]) -> Callable[[], Iterator[Row]]:
    """The rows of both models at each number of rows."""
    return lambda: (row for model in SHAPES for count in counts for row in rows(model, count))


ROW_COUNTS = (1, 64, 256, 8192)
product_kernels = kernel_command(
    {"chain": chain_rows, "some": some_rows, "prompt": prompt_rows},
    "Dense products of decode steps, in their order, of some rows, and of a prompt.",
)
row_kernels = kernel_command(
    {
        "norms": by_size(norm_rows, ROW_COUNTS),
        "residual": by_size(residual_rows, (256, 2048, 8192)),
        "gated": by_size(gated_rows, ROW_COUNTS),
        "swiglu": by_size(swiglu_rows, ROW_COUNTS),
        "draw": by_size(draw_rows, (1, 64, 256)),
    },
    "Norms, gated norms, SwiGLU and sampling.",
)
