"""Prefill scans on one GPU: Mamba2 (SSD) and the gated delta rule, and the cost of checkpoints on the way.

    python3 -m benchmarks kernels-scan [--library] [--only ssd ...]

Times of one layer's scan. A floor counts inputs and outputs once, the products that the chunked form needs at our chunk
size, no scratch. `--library` adds what others publish: mamba_ssm's scan (its Triton files are enough) and
flash-linear-attention's, with final states only, in float32 and without slots; their first call tunes for a while.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan import gdn_prefill_triton, gdn_tiles
from headrace.kernels.lib.segments import PrefillSegments, StateWrite
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.scan import ssd_prefill_triton, ssd_tiles
from headrace.models.config import GatedDeltaConfig, Mamba2Config

BF16 = torch.bfloat16
Run = Callable[[], object]


@dataclass(frozen=True)
class Batch:
    """Fresh sequences of equal length, each with `checkpoints` evenly spaced states, the last at its end."""

    num_sequences: int
    length: int
    checkpoints: int = 1
    shift: int = 0  # rows by which all but the last lie off even spacing

    def __str__(self) -> str:
        off = f" {self.shift} rows off" if self.shift else ""
        return f"{self.num_sequences} x {self.length}, {self.checkpoints} states{off}"

    @property
    def rows(self) -> int:
        return self.num_sequences * self.length

    @property
    def num_writes(self) -> int:
        return self.num_sequences * self.checkpoints

    def segments(self) -> PrefillSegments:
        spacing = self.length // self.checkpoints
        ends = [(i + 1) * spacing + self.shift for i in range(self.checkpoints - 1)] + [self.length]
        writes = [
            StateWrite(sequence, end, sequence * self.checkpoints + i)
            for sequence in range(self.num_sequences)
            for i, end in enumerate(ends)
        ]
        sources = [None] * self.num_sequences
        return PrefillSegments.build([self.length] * self.num_sequences, sources, writes, torch.device("cuda"))


BATCHES = [Batch(1, 2048), Batch(1, 8192), Batch(16, 4096), Batch(1, 32768)]
CHECKPOINTED = [Batch(1, 32768, 64), Batch(1, 32768, 64, shift=16)]

_SSD, _GDN = ssd_tiles(BF16, 64, 128, 8192), gdn_tiles(BF16)


class SsdLayer:
    """One layer of granite-h-micro, its inputs and pool made anew."""

    def __init__(self, batch: Batch, state_dtype: torch.dtype) -> None:
        config = SHAPES["granite-h-micro"].state
        assert isinstance(config, Mamba2Config)
        self.batch, self.segments = batch, batch.segments()
        self.H, self.P, self.N = H, P, N = config.num_heads, config.head_dim, config.state_size
        u = torch.randn(batch.rows, H * P + 2 * N + H, device="cuda", dtype=BF16)
        x, B, C, self.dt = u.split((H * P, N, N, H), dim=-1)
        self.x, self.B, self.C = x.view(-1, H, P), B.view(-1, 1, N), C.view(-1, 1, N)
        D, bias = torch.randn(2, H, device="cuda")
        self.heads = SsdHeads(-torch.rand(H, device="cuda") * 8, D, bias - 2)
        self.pool = torch.empty(batch.num_writes, 2, H, P, N, device="cuda", dtype=state_dtype)[:, 1]

    def scan(self) -> Run:
        inputs = self.x, self.dt, self.B, self.C
        return partial(ssd_prefill_triton, *inputs, self.heads, self.pool, self.segments, _SSD)

    def library(self) -> Run:
        """The scan of mamba_ssm."""
        scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        inputs = self.x, self.heads.time_steps(self.dt), self.B, self.C
        x, dt, B, C = (each.unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        return partial(scan, x, dt, self.heads.A, B, C, 256, D=self.heads.D, return_final_states=True)

    def cost(self) -> tuple[float, float]:
        """Bytes and FLOPs of the scan."""
        rows, H, state = self.batch.rows, self.H, self.H * self.P * self.N
        x_bytes, written_bytes = rows * H * self.P * 2, self.batch.num_writes * state * self.pool.itemsize
        within = _SSD.chunk_size * (H * self.P + self.N)  # the triangle only
        return 2 * x_bytes + rows * (4 * self.N + 2 * H) + written_bytes, rows * (4 * state + within)


class GdnLayer:
    """One layer of qwen35-4b, its inputs and pool made anew."""

    def __init__(self, batch: Batch, state_dtype: torch.dtype) -> None:
        config = SHAPES["qwen35-4b"].state
        assert isinstance(config, GatedDeltaConfig)
        self.batch, self.segments = batch, batch.segments()
        self.Hk, self.Hv, self.K, self.V = Hk, Hv, K, V = (
            config.num_key_heads, config.num_value_heads, config.key_dim, config.value_dim,
        )  # fmt: skip
        widths = Hk * K, Hk * K, Hv * V, Hv, Hv
        q, k, v, self.b, self.a = torch.randn(batch.rows, sum(widths), device="cuda", dtype=BF16).split(widths, dim=-1)
        self.q, self.k, self.v = (x.unflatten(1, (heads, -1)) for x, heads in ((q, Hk), (k, Hk), (v, Hv)))
        self.heads = GdnHeads(-torch.rand(Hv, device="cuda"), torch.randn(Hv, device="cuda"))
        self.pool = torch.empty(batch.num_writes, 2, Hv, K, V, device="cuda", dtype=state_dtype)[:, 1]

    def scan(self) -> Run:
        inputs = self.q, self.k, self.v, self.a, self.b
        return partial(gdn_prefill_triton, *inputs, self.heads, self.pool, self.segments, _GDN)

    def library(self) -> Run:
        """The scan of flash-linear-attention."""
        scan = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        inputs = (self.q, self.k, self.v, *self.heads.gates(self.a, self.b))
        q, k, v, g, beta = (each.contiguous().unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        return partial(scan, q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def cost(self) -> tuple[float, float]:
        """Bytes and FLOPs of the scan."""
        rows, H, state = self.batch.rows, self.Hv, self.Hv * self.K * self.V
        k_bytes, v_bytes = rows * self.Hk * self.K * 2, rows * H * self.V * 2
        written_bytes = self.batch.num_writes * state * self.pool.itemsize
        triangles = self.Hk * 2 * self.K + H * (self.K + 2 * self.V)  # k k, q k; w, u, outputs
        flops = rows * (6 * state + _GDN.chunk_size * triangles)
        return 2 * k_bytes + 2 * v_bytes + 4 * rows * H + written_bytes, flops


def scans(layer: type[SsdLayer | GdnLayer], name: str, published: str, library: bool) -> Iterator[Row]:
    def row(name: str, batch: Batch, state_dtype: torch.dtype, run: str) -> Row:
        num_bytes, flops = layer(batch, state_dtype).cost()
        prepare = lambda: getattr(layer(batch, state_dtype), run)()  # noqa: E731
        return measure(name, f"{batch} in {str(state_dtype)[6:]}", prepare, num_bytes, flops)

    for state_dtype in (torch.float32, torch.bfloat16):
        for batch in BATCHES + CHECKPOINTED:
            yield row(f"{name} scan", batch, state_dtype, "scan")
    for batch in BATCHES if library else ():
        yield row(published, batch, torch.float32, "library")


KINDS = {
    "ssd": partial(scans, SsdLayer, "ssd", "mamba_ssm"),
    "gdn": partial(scans, GdnLayer, "gdn", "flash-linear-attention"),
}
main = kernel_command(KINDS, "Prefill scans: Mamba2 (SSD) and the gated delta rule.")
