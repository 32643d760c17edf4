"""The Triton scan of Kimi delta attention against token-by-token float64, and as an H200 gets it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.prefill import kda_prefill_torch
from headrace.kernels.kda.scan import kda_prefill_triton, kda_tiles
from headrace.kernels.lib.segments import PrefillSegments
from tests.kernels.naive import naive_gdn
from tests.kernels.scans import DEVICE, RealScanTests, SmallScanTests, native, types
from tests.support.kernels.compiled import Launch, compile_for_h200


@dataclass
class Kda:
    """A layer's scan: H heads of keys of K and values of V. Heads forget from slowly to within a row."""

    H: int
    K: int
    V: int

    def __post_init__(self) -> None:
        self.state_shape = (self.H, self.K, self.V)
        A = -torch.logspace(-1, 1.5, self.H, device=DEVICE)
        self.heads = KdaHeads(A, torch.randn(self.H, self.K, device=DEVICE) - 1)

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.H * self.K, self.H * self.V
        u = torch.randn(T, 2 * keys + values, device=DEVICE).to(dtype)
        q, k, v = u.split((keys, keys, values), dim=-1)
        f, b = torch.randn(T, keys, device=DEVICE).to(dtype), torch.randn(T, self.H + 3, device=DEVICE).to(dtype)[:, 3:]
        q, k, f = (each.unflatten(1, (self.H, self.K)) for each in (q, k, f))
        return q, k, v.unflatten(1, (self.H, self.V)), f, b

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        *qkv, f, b = inputs
        g = softplus(f.double() + self.heads.dt_bias) * self.heads.A[:, None]
        return naive_gdn(*qkv, g, b.double().sigmoid(), state)

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        return kda_prefill_triton(*inputs, self.heads, pool, segments)

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        q, k, v, f, b = inputs
        return kda_prefill_torch(q.float(), k.float(), v.float(), f, b, self.heads, pool, segments)


# Sizes below the least that a matrix product takes, and no powers of two.
SMALL = {"kda": lambda: Kda(H=2, K=12, V=20)}
REAL = {"kimi": lambda: Kda(H=32, K=128, V=128)}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
class TestTriton(SmallScanTests):
    """Sizes that the interpreter can run."""


@native
@pytest.mark.parametrize("make", REAL.values(), ids=REAL)
class TestTritonOnTheGpu(RealScanTests):
    """The layers of a real model."""


@pytest.mark.slow
def test_kda_scan_compiles_for_an_h200():
    """Kimi's sizes, in bfloat16: next to nothing spills, and products go to the matrix units."""
    tiles, kernels = kda_tiles(torch.bfloat16), "headrace.kernels.kda.scan:_kda_"
    sizes = {"H": 32, "K": 128, "Q": tiles.chunk_size, "BLOCK_K": 128}
    bf16 = torch.bfloat16
    launches = [
        Launch(f"{kernels}decay_kernel", types("f", "A bias decay", "chunks", "f", bf16), sizes, num_warps=4),
        Launch(
            f"{kernels}systems_kernel",
            types("q k v b u w score from_start to_end", "decay", "chunks", "q k v b", bf16),
            sizes | {"V": 128, "EPS": 1e-6, "BLOCK_V": 128, "LEVELS": 6, "EXACT": False},
            num_warps=tiles.systems_warps,
            num_stages=1,
        ),
        Launch(
            f"{kernels}states_kernel",
            types("u w to_end start", "decay pool", "chunks sequences", "slot", bf16),
            sizes | {"V": 128, "BLOCK_V": tiles.state_columns},
            num_warps=tiles.states_warps,
            num_stages=tiles.states_stages,
        ),
        Launch(
            f"{kernels}output_kernel",
            types("from_start start score values o", "", "chunks", "", bf16),
            sizes | {"V": 128, "BLOCK_V": tiles.output_columns},
            num_warps=tiles.output_warps,
        ),
    ]
    decay, *others = compile_for_h200(launches)
    assert decay.stack_bytes == 0, decay
    for report in others:
        assert report.stack_bytes <= 128, report
        assert "wgmma.mma_async" in report.ptx
