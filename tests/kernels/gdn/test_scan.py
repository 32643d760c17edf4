"""The Triton scan of the gated delta rule against token-by-token float64, and as an H200 gets it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.prefill import gdn_prefill_torch
from headrace.kernels.gdn.scan import GdnTiles, gdn_prefill_triton, gdn_tiles
from headrace.kernels.lib.dot import swizzle_block
from headrace.kernels.lib.segments import PrefillSegments
from tests.kernels.naive import naive_gdn
from tests.kernels.scans import (
    DEVICE,
    RealScanTests,
    SmallScanTests,
    assert_keeps_to_registers_and_matrix_units,
    native,
    types,
)
from tests.support.kernels.compiled import Launch, compile_for_h200


@dataclass
class Gdn:
    """A gated delta layer's scan: Hk key heads of K, Hv value heads of V."""

    Hk: int
    Hv: int
    K: int
    V: int
    tiles: GdnTiles | None = None
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        self.state_shape = (self.Hv, self.K, self.V)
        A, bias = -torch.rand(self.Hv, device=DEVICE), torch.randn(self.Hv, device=DEVICE) - 1
        self.heads = GdnHeads(A, bias, self.beta_scale)

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.Hk * self.K, self.Hv * self.V
        u = torch.randn(T, 2 * keys + values, device=DEVICE).to(dtype)
        q, k, v = u.split((keys, keys, values), dim=-1)
        a, b = torch.randn(2, T, self.Hv + 3, device=DEVICE).to(dtype)[..., 3:]
        q, k = (each.unflatten(1, (self.Hk, self.K)) for each in (q, k))
        return q, k, v.unflatten(1, (self.Hv, self.V)), a, b

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        *qkv, a, b = inputs
        g = softplus(a.double() + self.heads.dt_bias) * self.heads.A
        return naive_gdn(*qkv, g, b.double().sigmoid() * self.beta_scale, state)

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        return gdn_prefill_triton(*inputs, self.heads, pool, segments, self.tiles)

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        q, k, v, a, b = inputs
        return gdn_prefill_torch(q.float(), k.float(), v.float(), a, b, self.heads, pool, segments)


# Sizes below the least that a matrix product takes, or no powers of two.
SMALL = {
    "gdn": lambda: Gdn(Hk=2, Hv=2, K=8, V=6),
    "gdn_repeat": lambda: Gdn(Hk=2, Hv=4, K=6, V=20),
    "gdn_twice_beta": lambda: Gdn(Hk=3, Hv=3, K=12, V=24, beta_scale=2.0),
}
REAL = {"qwen": lambda: Gdn(Hk=16, Hv=32, K=128, V=128)}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
class TestTriton(SmallScanTests):
    """Sizes that the interpreter can run."""


@native
@pytest.mark.parametrize("make", REAL.values(), ids=REAL)
class TestTritonOnTheGpu(RealScanTests):
    """Sizes of real models."""


def gdn_launches(
    tiles: GdnTiles, dtype: torch.dtype, H: int = 32, R: int = 2, K: int = 128, V: int = 128
) -> list[Launch]:
    module, Q = "headrace.kernels.gdn.scan", tiles.chunk_size
    sizes = {"H": H, "R": R, "K": K, "V": V, "Q": Q, "BLOCK_K": K}
    return [
        Launch(
            "headrace.kernels.gdn.systems:_gdn_systems_kernel",
            types("k v a b u w", "A bias decay to_end", "chunks", "k v a b", dtype),
            sizes
            | {"BLOCK_K": swizzle_block(K, dtype), "BLOCK_V": swizzle_block(V, dtype)}
            | {"EPS": 1e-6, "BETA_SCALE": 1.0, "EXACT": dtype == torch.float32, "FETCH": dtype != torch.float32},
            tiles.systems_warps,
            registers=tiles.systems_registers,
        ),
        Launch(
            f"{module}:_gdn_states_kernel",
            types("k u w start", "decay to_end pool", "chunks sequences", "k slot", dtype),
            sizes | {"BLOCK_V": tiles.state_columns},
            tiles.states_warps,
            tiles.states_stages,
        ),
        Launch(
            f"{module}:_gdn_output_kernel",
            types("q k values start o", "decay", "chunks", "q k", dtype),
            sizes | {"EPS": 1e-6, "BLOCK_V": tiles.output_columns},
            tiles.output_warps,
            tiles.output_stages,
            tiles.output_registers,
        ),
    ]


def test_gdn_scan():
    systems, states, outputs = compile_for_h200(gdn_launches(gdn_tiles(torch.bfloat16), torch.bfloat16))
    # Three programs on a multiprocessor for a few words that go to memory: 5 % faster on an H200 (docs/gpu-notes.md).
    assert_keeps_to_registers_and_matrix_units(systems, states, outputs, spilled=96)
    assert states.stack_bytes == 0
    assert systems.resident_warps == outputs.resident_warps == 12


@pytest.mark.parametrize(("K", "V"), [(8, 6), (32, 32), (64, 64)], ids=str)
def test_gdn_scan_of_small_heads_reads_what_was_written(K: int, V: int):
    systems = gdn_launches(gdn_tiles(torch.bfloat16), torch.bfloat16, H=4, K=K, V=V)[0]
    compile_for_h200([systems])  # it checks


def test_float32_spills_little_if_anything():
    for report in compile_for_h200(gdn_launches(gdn_tiles(torch.float32), torch.float32)):
        assert report.stack_bytes < 256, report
