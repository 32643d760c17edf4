"""The Triton scan of Mamba2 against token-by-token float64, and as an H200 gets it."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.lib.dot import dot_block, swizzle_block
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.prefill import ssd_prefill_torch
from headrace.kernels.ssd.scan import SsdTiles, ssd_prefill_triton, ssd_tiles
from tests.kernels.naive import naive_ssd
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
class Ssd:
    """A Mamba2 layer's scan: H heads of P, N states, G groups."""

    H: int
    P: int
    N: int
    G: int
    tiles: SsdTiles | None = None
    heads: SsdHeads = field(init=False)

    def __post_init__(self) -> None:
        self.state_shape = (self.H, self.P, self.N)
        A, D, bias = -torch.rand(self.H, device=DEVICE) * 4, *torch.randn(2, self.H, device=DEVICE)
        self.heads = SsdHeads(A, D, bias - 2, dt_max=0.9)

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As the engine passes them: parts of wider rows, which begin at multiples of 16 numbers if their parts do."""
        shared, inner = self.G * self.N, self.H * self.P
        u = torch.randn(T, inner + 2 * shared + 16, device=DEVICE).to(dtype)
        x, B, C, _ = u.split((inner, shared, shared, 16), dim=-1)
        dt = torch.randn(T, self.H + 4, device=DEVICE).to(dtype)[:, : self.H]
        return (
            x.unflatten(1, (self.H, self.P)),
            dt,
            B.unflatten(1, (self.G, self.N)),
            C.unflatten(1, (self.G, self.N)),
        )

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C = inputs
        dt = softplus(raw.double() + self.heads.dt_bias).clamp(max=self.heads.dt_max)
        return naive_ssd(x, dt, self.heads.A, B, C, self.heads.D, state)

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        tiles = self.tiles if inputs[0].dtype == torch.bfloat16 else None
        return ssd_prefill_triton(*inputs, self.heads, pool, segments, tiles)

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        x, *others = inputs
        return ssd_prefill_torch(x.float(), *others, self.heads, pool, segments)


# Sizes below the least that a matrix product takes, or no powers of two; and one whose rows begin at 32 bytes.
SMALL = {
    "ssd": lambda: Ssd(H=3, P=8, N=6, G=1),
    "ssd_groups": lambda: Ssd(H=4, P=20, N=6, G=2),
    "ssd_aligned": lambda: Ssd(H=8, P=16, N=24, G=1),
}
REAL = {
    "granite": lambda: Ssd(H=64, P=64, N=128, G=1),
    "nemotron": lambda: Ssd(H=32, P=64, N=128, G=8),
    "falcon": lambda: Ssd(H=24, P=64, N=256, G=1),
    "granite, cut as many rows are": lambda: Ssd(64, 64, 128, 1, SsdTiles(128, 64, 64, 8)),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
class TestTriton(SmallScanTests):
    """Sizes that the interpreter can run."""


@native
@pytest.mark.parametrize("make", REAL.values(), ids=REAL)
class TestTritonOnTheGpu(RealScanTests):
    """Sizes of real models."""


def ssd_launches(
    tiles: SsdTiles, dtype: torch.dtype, H: int = 64, P: int = 64, N: int = 128, G: int = 1
) -> list[Launch]:
    module, Q = "headrace.kernels.ssd.scan", tiles.chunk_size
    sizes = {"H": H, "P": P, "N": N, "HEADS_A_GROUP": H // G, "Q": Q, "BLOCK_P": dot_block(P)}
    return [
        Launch(
            f"{module}:_ssd_decay_kernel",
            types("dt", "A bias decay chunk_dt", "chunks", "dt", dtype),
            {"H": H, "Q": Q, "BLOCK_H": 16, "DT_MIN": 0.0, "DT_MAX": float("inf")},
        ),
        Launch(
            f"{module}:_ssd_states_kernel",
            types("x B start", "decay chunk_dt pool", "chunks sequences", "x B slot", dtype),
            sizes | {"BLOCK_N": min(tiles.state_columns, dot_block(N))},
            tiles.states_warps,
            tiles.states_stages,
        ),
        Launch(
            f"{module}:_ssd_output_kernel",
            types("x B C start y", "D decay chunk_dt", "chunks", "x B C", dtype),
            sizes
            | {"HEADS": tiles.output_heads, "BLOCK_M": tiles.output_rows}
            | {"BLOCK_P": swizzle_block(P, dtype), "BLOCK_N": swizzle_block(N, dtype)},
            tiles.output_warps,
            tiles.output_stages,
        ),
    ]


@pytest.mark.parametrize(("H", "N", "G"), [(64, 128, 1), (24, 256, 1)], ids=["granite", "falcon"])
def test_ssd_scan(H: int, N: int, G: int):
    launches = ssd_launches(ssd_tiles(torch.bfloat16, H // G, N, 8192), torch.bfloat16, H=H, N=N, G=G)
    assert_keeps_to_registers_and_matrix_units(*compile_for_h200(launches))


def test_ssd_outputs_of_few_rows():
    *_, outputs = ssd_launches(ssd_tiles(torch.bfloat16, 64, 128, 16), torch.bfloat16)
    [report] = compile_for_h200([outputs])
    assert report.stack_bytes == 0 and "wgmma.mma_async" in report.ptx


@pytest.mark.parametrize("num_rows", [16, 8192])
@pytest.mark.parametrize(("P", "N"), [(16, 24), (32, 64), (64, 32)], ids=str)
def test_ssd_scan_of_small_heads_reads_what_was_written(P: int, N: int, num_rows: int):
    launches = ssd_launches(ssd_tiles(torch.bfloat16, 8, N, num_rows), torch.bfloat16, H=8, P=P, N=N)
    *_, outputs = compile_for_h200(launches)  # it checks
    assert "wgmma.mma_async" in outputs.ptx


def test_float32_spills_little_if_anything():
    launches = ssd_launches(ssd_tiles(torch.float32, 64, 128, 8192), torch.float32)
    for report in compile_for_h200(launches):
        assert report.stack_bytes < 256, report
