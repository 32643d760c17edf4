"""Prefill scans on one GPU: Mamba2 (SSD) and the gated delta rule, and what checkpoints on the way cost.

    python -m bench.gpu_kernels_scan [--parts] [--library]

Times are medians of CUDA graph replays of one layer's scan. A floor is the larger of FLOPs / 790 TFLOP/s and bytes
/ 4.3 TB/s, what such a machine reaches (shared/anchors/h200.md): inputs and outputs once, the products that the
chunked form needs at our chunk size, no scratch. `--parts` adds the kernels one by
one, with the scratch that each reads and writes in its floor, `--library` what others publish, where it can be
imported: mamba_ssm's scan (its Triton files are enough) and flash-linear-attention's, with final states only and
without slots; their first call tunes itself for a while.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bench.shapes import SHAPES
from engine.model_config import GatedDeltaConfig, Mamba2Config
from kernels import gdn_scan, ssd_scan
from kernels.gdn_heads import GdnHeads
from kernels.gdn_scan import gdn_prefill_triton, gdn_tiles
from kernels.segments import PrefillSegments, StateWrite
from kernels.ssd_heads import SsdHeads
from kernels.ssd_scan import ssd_prefill_triton, ssd_tiles

FLOPS_A_SECOND, BYTES_A_SECOND = 790e12, 4.3e12
BF16 = torch.bfloat16


class Row(NamedTuple):
    kernel: str
    shape: str
    time_us: float
    floor_us: float

    def __str__(self) -> str:
        share = self.floor_us / self.time_us
        return f"| {self.kernel} | {self.shape} | {self.time_us:.1f} | {self.floor_us:.1f} | {share:.0%} |"


HEADER = "| kernel | shape | us | floor us | of floor |\n|---|---|---|---|---|"


def row(kernel: str, shape: str, run: Callable[[], object], num_bytes: float, flops: float) -> Row:
    """A variant that does not fit the chip gives no row's time, but its name."""
    try:
        took = triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1e3
    except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
        print(f"{kernel}, {shape}: {error}")
        took = float("nan")
    return Row(kernel, shape, took, max(num_bytes / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6)


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
    """One layer of granite-h-micro."""

    def __init__(self, batch: Batch):
        config = SHAPES["granite-h-micro"].state
        assert isinstance(config, Mamba2Config)
        self.batch, self.segments = batch, batch.segments()
        self.H, self.P, self.N = H, P, N = config.num_heads, config.head_dim, config.state_size
        u = torch.randn(batch.rows, H * P + 2 * N + H, device="cuda", dtype=BF16)
        x, B, C, self.dt = u.split((H * P, N, N, H), dim=-1)
        self.x, self.B, self.C = x.view(-1, H, P), B.view(-1, 1, N), C.view(-1, 1, N)
        D, bias = torch.randn(2, H, device="cuda")
        self.heads = SsdHeads(-torch.rand(H, device="cuda") * 8, D, bias - 2)
        self.pool = torch.empty(batch.num_writes, 2, H, P, N, device="cuda")[:, 1]

    def run(self) -> Tensor:
        return ssd_prefill_triton(self.x, self.dt, self.B, self.C, self.heads, self.pool, self.segments, _SSD)

    def library(self) -> Row:
        scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        inputs = self.x, self.heads.time_steps(self.dt), self.B, self.C
        x, dt, B, C = (each.unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        run = lambda: scan(x, dt, self.heads.A, B, C, 256, D=self.heads.D, return_final_states=True)  # noqa: E731
        return row("mamba_ssm", str(self.batch), run, self.num_bytes(), self.flops())

    @property
    def state_size(self) -> int:
        return self.H * self.P * self.N

    def num_bytes(self) -> float:
        rows = self.batch.rows * (2 * self.H * self.P * 2 + 2 * self.N * 2 + self.H * 2)
        return rows + self.batch.num_writes * self.state_size * 4

    def flops(self) -> float:
        within = _SSD.chunk_size * (self.H * self.P + self.N)  # the triangle only
        return self.batch.rows * (4 * self.state_size + within)

    def parts(self) -> Iterator[Row]:
        rows, H, Q = self.batch.rows, self.H, _SSD.chunk_size
        table = self.segments.chunk_table(Q)
        start_bytes = len(table.chunks_C4) * self.state_size * 2
        x_bytes, row_bytes = rows * H * self.P * 2, rows * H * 4
        decay, chunk_dt = ssd_scan._launch_decays(self.dt, self.heads, table, _SSD)
        yield row(
            "ssd decays", str(self.batch), lambda: ssd_scan._launch_decays(self.dt, self.heads, table, _SSD),
            3 * row_bytes, 0,
        )  # fmt: skip
        run = lambda: ssd_scan._launch_states(self.x, self.B, decay, chunk_dt, self.pool, table, _SSD)  # noqa: E731
        yield row("ssd states", str(self.batch), run, x_bytes + start_bytes + 2 * row_bytes, 2 * rows * self.state_size)
        start, y = run(), torch.empty_like(self.x)
        yield row(
            "ssd outputs",
            str(self.batch),
            lambda: ssd_scan._launch_outputs(
                self.x, self.B, self.C, self.heads.D, decay, chunk_dt, start, y, table, _SSD
            ),
            2 * x_bytes + start_bytes + 2 * row_bytes,
            rows * (2 * self.state_size + Q * H * self.P),
        )


class GdnLayer:
    """One layer of qwen35-4b."""

    def __init__(self, batch: Batch):
        config = SHAPES["qwen35-4b"].state
        assert isinstance(config, GatedDeltaConfig)
        self.batch, self.segments = batch, batch.segments()
        self.Hk, self.Hv, self.K, self.V = (
            config.num_key_heads,
            config.num_value_heads,
            config.key_dim,
            config.value_dim,
        )
        keys, values = self.Hk * self.K, self.Hv * self.V
        u = torch.randn(batch.rows, 2 * keys + values + 2 * self.Hv, device="cuda", dtype=BF16)
        q, k, v, self.b, self.a = u.split((keys, keys, values, self.Hv, self.Hv), dim=-1)
        self.q, self.k, self.v = (
            q.unflatten(1, (self.Hk, -1)),
            k.unflatten(1, (self.Hk, -1)),
            v.unflatten(1, (self.Hv, -1)),
        )
        self.heads = GdnHeads(-torch.rand(self.Hv, device="cuda"), torch.randn(self.Hv, device="cuda"))
        self.pool = torch.empty(batch.num_writes, 2, self.Hv, self.K, self.V, device="cuda")[:, 1]

    def run(self) -> Tensor:
        return gdn_prefill_triton(self.q, self.k, self.v, self.a, self.b, self.heads, self.pool, self.segments, _GDN)

    def library(self) -> Row:
        scan = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        inputs = (self.q, self.k, self.v, *self.heads.gates(self.a, self.b))
        q, k, v, g, beta = (each.contiguous().unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        run = lambda: scan(  # noqa: E731
            q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return row("flash-linear-attention", str(self.batch), run, self.num_bytes(), self.flops())

    @property
    def state_size(self) -> int:
        return self.Hv * self.K * self.V

    def num_bytes(self) -> float:
        rows = self.batch.rows * (2 * self.Hk * self.K * 2 + 2 * self.Hv * self.V * 2 + 2 * self.Hv * 2)
        return rows + self.batch.num_writes * self.state_size * 4

    def flops(self) -> float:
        Q = _GDN.chunk_size
        triangles = self.Hk * 2 * self.K + self.Hv * (self.K + 2 * self.V)  # k k, q k; w, u, outputs
        return self.batch.rows * (6 * self.state_size + Q * triangles)

    def parts(self) -> Iterator[Row]:
        rows, H, Q = self.batch.rows, self.Hv, _GDN.chunk_size
        table = self.segments.chunk_table(Q)
        start_bytes = len(table.chunks_C4) * self.state_size * 2
        k_bytes, v_bytes = rows * self.Hk * self.K * 2, rows * H * self.V * 2
        w_bytes = rows * H * self.K * 2
        systems = lambda: gdn_scan._launch_systems(self.k, self.v, self.a, self.b, self.heads, table, _GDN)  # noqa: E731
        yield row(
            "gdn systems", str(self.batch), systems, k_bytes + 2 * v_bytes + w_bytes,
            rows * H * Q * (4 * self.K + 2 * self.V + 20 * Q),
        )  # fmt: skip
        # V' replaces u: the states kernel cannot run twice on the same u, and the systems' time comes off by hand.
        states = lambda u, w, decay, to_end: gdn_scan._launch_states(  # noqa: E731
            self.k, u, w, decay, to_end, self.pool, table, _GDN
        )
        yield row(
            "gdn systems, states",
            str(self.batch),
            lambda: states(*systems()),
            2 * k_bytes + 4 * v_bytes + 2 * w_bytes + start_bytes,
            rows * H * Q * (4 * self.K + 2 * self.V + 20 * Q) + 4 * rows * self.state_size,
        )
        u, w, decay, to_end = systems()
        start, o = states(u, w, decay, to_end), torch.empty_like(self.v)
        yield row(
            "gdn outputs",
            str(self.batch),
            lambda: gdn_scan._launch_outputs(self.q, self.k, u, decay, start, o, table, _GDN),
            2 * k_bytes + 2 * v_bytes + start_bytes,
            rows * (2 * self.state_size + 2 * Q * (H * self.V + self.Hk * self.K)),
        )


@torch.no_grad()
def rows(parts: bool = False, library: bool = False) -> Iterator[Row]:
    for name, layer_of in (("ssd", SsdLayer), ("gdn", GdnLayer)):
        for batch in BATCHES + CHECKPOINTED:
            layer = layer_of(batch)
            yield row(f"{name} prefill", str(batch), layer.run, layer.num_bytes(), layer.flops())
            if library and batch in BATCHES:
                yield layer.library()
            if parts and batch in BATCHES:
                yield from layer.parts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="the kernels one by one, too")
    parser.add_argument("--library", action="store_true", help="what others publish, too")
    arguments = parser.parse_args()
    print(HEADER)
    for each in rows(arguments.parts, arguments.library):
        print(each, flush=True)


if __name__ == "__main__":
    main()
