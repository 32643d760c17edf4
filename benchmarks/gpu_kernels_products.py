"""Dense products on one GPU: of decode steps, alone and in their order with the norms between, and of a prompt.

    python -m benchmarks.gpu_kernels_products [--variants] [--only alone chain prompt]
    python -m benchmarks.gpu_kernels_products --compile-only

Times as in benchmarks/gpu_timing.py: no weight is in the cache when it is read. Alone, a product still overlaps with
the next one of its kind. A chain is timed as it runs, without overlap (same kernels, launched one after the other's
end), and with the library's products: it decides, since a tile that leaves room lets the next product begin earlier.
`--variants` adds other tiles. A prompt's products are cuBLAS's, but for those that a SwiGLU takes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_kinds import main
from benchmarks.gpu_timing import Row, measure, time_us
from benchmarks.shapes import SHAPES
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.dense.small_linear import Tile, sizes, small_linear_triton, tile_for
from headrace.kernels.dense.swiglu import swiglu_triton
from headrace.kernels.dense.swiglu_linear_hopper import COLUMNS, CONSUMERS, ROWS, swiglu_linear_hopper
from headrace.kernels.lib.hopper import LAYOUT, SPAN, launch_registers, registers
from headrace.kernels.lib.pdl import OVERLAPPED
from headrace.models.config import Mamba2Config, ModelConfig
from tests.support.kernels.compiled import Launch

BF16 = torch.bfloat16
BATCHES = (1, 16, 64)
PROMPT_ROWS = 8192
FEW = [(64, 128, 3), (64, 256, 3), (32, 256, 3), (16, 512, 3), (128, 64, 4), (128, 128, 3)]  # columns, depth, stages
MANY = [(64, 64, 4), (64, 64, 8), (64, 128, 3), (128, 64, 4), (128, 64, 6), (128, 128, 3)]


@dataclass(frozen=True)
class Product:
    name: str
    O: int  # noqa: E741
    I: int  # noqa: E741
    form: str

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.O * self.I


def products(config: ModelConfig) -> list[Product]:
    """Those of a model, each once."""
    hidden, state, attention = config.hidden_size, config.state, config.attention
    if isinstance(state, Mamba2Config):
        inner, state_rows = state.inner_size, state.inner_size + state.conv_channels + state.num_heads
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
        Product("head", config.vocab_size, hidden, "logits"),
    ]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def library(x: Tensor, weight: Tensor, form: str) -> Tensor:
    """The same from torch's product, which is cuBLAS's."""
    y = F.linear(x, weight)
    if form == "gated":
        return swiglu_triton(y)
    return y.float() / 8 if form == "logits" else y


def tiles(product: Product, M: int) -> Iterator[Tile]:
    """Around the choice."""
    chosen = tile_for(M, product.O, product.I, product.form == "parts")
    for columns, depth, num_stages in FEW if M <= 16 else MANY:
        if product.I % (chosen.parts * depth) == 0:
            yield Tile(columns, depth, chosen.parts, 4, num_stages)
    if product.form == "parts":
        yield from (chosen._replace(parts=parts) for parts in (chosen.parts // 2, chosen.parts * 2))
    yield from (chosen._replace(ahead=ahead) for ahead in (0, 512))
    yield chosen._replace(num_warps=8)


def alone_rows(variants: bool) -> Iterator[Row]:
    for model, config in SHAPES.items():
        for product in products(config):
            for M in BATCHES:
                chosen = tile_for(M, product.O, product.I, product.form == "parts")
                runs: dict[str, Callable[..., Tensor]] = {"library": library}
                for tile in [chosen, *(tiles(product, M) if variants and M != 16 else ())]:
                    runs[f"{tuple(tile)}"] = partial(small_linear_triton, divisor=8.0, tile=tile)
                for name, run in runs.items():
                    yield measure(f"{product.name} {name}", f"{model}, {M} rows",
                                  lambda: partial(run, random(M, product.I), random(product.O, product.I),  # noqa: B023
                                                  form=product.form), product.num_bytes)  # noqa: B023 # fmt: skip


@contextmanager
def nothing_overlaps() -> Iterator[None]:
    """The same kernels; each starts when the one before it is done."""
    options = dict(OVERLAPPED)
    OVERLAPPED.clear()
    try:
        yield
    finally:
        OVERLAPPED.update(options)


@functools.cache
def ones(width: int) -> Tensor:
    return torch.ones(width, device="cuda")


def state_stand_in(projected: Tensor, width: int) -> Tensor:
    """Three small kernels, each of which waits for the one before it, in place of convolution, state and gated norm."""
    rows, norm = projected[:, :width], ones(width)
    for _ in range(3):
        rows = rms_norm(rows, norm, 1e-5)
    return rows


def library_layer(x: Tensor, normed: Tensor, weights: list[Tensor], norm: Tensor) -> tuple[Tensor, Tensor]:
    in_proj, out_proj, gate_up, down = weights
    mixed = F.linear(state_stand_in(F.linear(normed, in_proj), out_proj.shape[1]), out_proj)
    x, normed = add_rms_norm(x, mixed, 0.22, norm, 1e-5)
    return add_rms_norm(x, F.linear(swiglu_triton(F.linear(normed, gate_up)), down), 0.22, norm, 1e-5)


def own_layer(x: Tensor, normed: Tensor, weights: list[LinearWeight], norm: Tensor) -> tuple[Tensor, Tensor]:
    in_proj, out_proj, gate_up, down = weights
    mixed = out_proj.parts(state_stand_in(in_proj(normed), out_proj.in_features))
    x, normed = add_rms_norm(x, mixed, 0.22, norm, 1e-5)
    return add_rms_norm(x, down.parts(gate_up.swiglu(normed)), 0.22, norm, 1e-5)


def chain_rows(_variants: bool) -> Iterator[Row]:
    """Ten layers of two norms and four products; the time is a layer's."""
    num_layers = 10
    for model, config in SHAPES.items():
        matrices = [[random(p.O, p.I) * p.I**-0.5 for p in products(config)[:4]] for _ in range(num_layers)]
        own = [[LinearWeight(weight) for weight in layer] for layer in matrices]
        norm = torch.rand(config.hidden_size, device="cuda")
        num_bytes = sum(p.num_bytes for p in products(config)[:4])
        for M in BATCHES:
            x = random(M, config.hidden_size)

            def layers_us(layer: Callable, weights: list) -> float:
                def run() -> None:
                    stream, normed = x, x  # noqa: B023
                    for each in weights:
                        stream, normed = layer(stream, normed, each, norm)  # noqa: B023

                return time_us([run]) / num_layers

            shape = f"{model}, {M} rows"
            yield Row("chain, library", shape, layers_us(library_layer, matrices), num_bytes)
            yield Row("chain", shape, layers_us(own_layer, own), num_bytes)
            with nothing_overlaps():
                apart_us = layers_us(own_layer, own)
            yield Row("chain, nothing overlaps", shape, apart_us, num_bytes)


def prompt_rows(_variants: bool) -> Iterator[Row]:
    """A chunk's products: the matrix rate that prefill is charged with, shape by shape."""
    M = PROMPT_ROWS
    for model, config in SHAPES.items():
        for product in products(config)[:-1]:  # few rows have logits
            O, I = product.O, product.I  # noqa: E741
            num_outputs = O // 2 if product.form == "gated" else O
            num_bytes, flops = product.num_bytes + 2.0 * M * (I + num_outputs), 2.0 * M * I * O
            runs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"library": partial(library, form=product.form)}
            if product.form == "gated":
                runs["by hand"] = swiglu_linear_hopper
            for name, run in runs.items():
                yield measure(f"{product.name} {name}", f"{model}, {M:,} rows",
                              lambda: partial(run, random(M, I), random(O, I)), num_bytes, flops)  # noqa: B023 # fmt: skip


KINDS = {"alone": alone_rows, "chain": chain_rows, "prompt": prompt_rows}


# ---------------------------------------------------------------- what the compiler makes of them, without a GPU


def product_launch(product: Product, M: int, tile: Tile | None = None) -> Launch:
    tile = tile or tile_for(M, product.O, product.I, product.form == "parts")
    out = "fp32" if product.form in ("logits", "parts") else "bf16"
    types = {"x_ptr": "*bf16:16", "weight_ptr": "*bf16:16", "out_ptr": f"*{out}:16", "stride_x": "i32:16"}
    types |= {"M": "i32", "divisor": "fp32"}
    constexprs = {"OUT": product.O, "IN": product.I, "FORM": product.form, **sizes(M, product.I, tile)}
    return Launch(
        "headrace.kernels.dense.small_linear:_small_linear_kernel", types, constexprs, tile.num_warps, tile.num_stages
    )


def gated_launch(dtype: str = "bf16") -> Launch:
    def described(rows: int, columns: int) -> str:
        return f"tensordesc<{dtype}[{rows},{columns}],{LAYOUT.value!r}>"

    types = {"x_desc": described(ROWS.value, SPAN.value), "weight_desc": described(COLUMNS.value, SPAN.value)}
    types |= {"y_desc": described(ROWS.value, COLUMNS.value)}
    types |= {"num_row_tiles": "i32", "num_columns": "i32", "num_pieces": "i32"}
    consumers = CONSUMERS.value
    constexprs = dict(zip(("REGISTERS", "PRODUCER_REGISTERS"), registers(consumers), strict=True))
    kernel = "headrace.kernels.dense.swiglu_linear_hopper:_swiglu_linear_kernel"
    return Launch(kernel, types, constexprs, 4, 1, launch_registers(consumers))


def compile_checks() -> Iterator[tuple[str, Launch]]:
    for model, config in SHAPES.items():
        for product in products(config):
            for M in BATCHES:
                tile = tile_for(M, product.O, product.I, product.form == "parts")
                yield f"{model} {product.name}, {M} rows, {tuple(tile)}", product_launch(product, M, tile)
    yield "gate_up by hand", gated_launch()


if __name__ == "__main__":
    main(__doc__, KINDS, compile_checks)
