"""Dense products on one GPU: of decode steps, alone and in their order with the norms between, and of a prompt.

    python3 -m benchmarks kernels-products [--library] [--only alone ...]

No weight is in the cache when it is read. Alone, a product still overlaps with the next one of its kind. A chain is
timed as it runs, without overlap (same kernels, each launched at the end of the one before), and with cuBLAS: it
decides, since a tile that leaves registers and shared memory lets the next product begin earlier. A prompt's products
are cuBLAS's, but for those that a SwiGLU takes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure, time_us
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.dense.small_linear import small_linear_triton
from headrace.kernels.dense.swiglu import swiglu_triton
from headrace.kernels.dense.swiglu_linear_hopper import swiglu_linear_hopper
from headrace.kernels.lib.pdl import OVERLAPPED
from headrace.models.config import Mamba2Config, ModelConfig

BF16 = torch.bfloat16
BATCHES = (1, 16, 64)
PROMPT_ROWS = 8192


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
    """A model's products, each once."""
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


def cublas(x: Tensor, weight: Tensor, form: str) -> Tensor:
    """The same product by torch, that is by cuBLAS."""
    y = F.linear(x, weight)
    if form == "gated":
        return swiglu_triton(y)
    return y.float() / 8 if form == "logits" else y


def alone_rows(library: bool) -> Iterator[Row]:
    for model, config in SHAPES.items():
        for product in products(config):
            for M in BATCHES:
                runs: dict[str, Callable[..., Tensor]] = {"own": partial(small_linear_triton, divisor=8.0)}
                runs |= {"cuBLAS": cublas} if library else {}
                for name, run in runs.items():
                    inputs = partial(random, M, product.I), partial(random, product.O, product.I)
                    prepare = partial(prepared, run, *inputs, form=product.form)
                    yield measure(f"{product.name} {name}", f"{model}, {M} rows", prepare, product.num_bytes)


def prepared(
    run: Callable[..., Tensor], x: Callable[[], Tensor], weight: Callable[[], Tensor], **given: str
) -> Callable:
    """`run` bound to fresh inputs."""
    return partial(run, x(), weight(), **given)


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


def chain_rows(library: bool) -> Iterator[Row]:
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
            yield Row("chain, cuBLAS", shape, layers_us(cublas_layer, matrices), num_bytes)
            yield Row("chain", shape, layers_us(own_layer, own), num_bytes)
            with nothing_overlaps():
                apart_us = layers_us(own_layer, own)
            yield Row("chain, nothing overlaps", shape, apart_us, num_bytes)


def prompt_rows(library: bool) -> Iterator[Row]:
    """Products of a chunk: the matrix rate that prefill is charged with, shape by shape."""
    M = PROMPT_ROWS
    for model, config in SHAPES.items():
        for product in products(config)[:-1]:  # few rows have logits
            num_outputs = product.O // 2 if product.form == "gated" else product.O
            num_bytes = product.num_bytes + 2.0 * M * (product.I + num_outputs)
            runs: dict[str, Callable[..., Tensor]] = {"cuBLAS": partial(cublas, form=product.form)}
            runs |= {"Hopper": swiglu_linear_hopper} if product.form == "gated" else {}
            for name, run in runs.items():
                prepare = partial(prepared, run, partial(random, M, product.I), partial(random, product.O, product.I))
                flops = 2.0 * M * product.I * product.O
                yield measure(f"{product.name} {name}", f"{model}, {M:,} rows", prepare, num_bytes, flops)


KINDS = {"alone": alone_rows, "chain": chain_rows, "prompt": prompt_rows}
main = kernel_command(KINDS, "Dense products of decode steps, alone and in their order, and of a prompt.")
