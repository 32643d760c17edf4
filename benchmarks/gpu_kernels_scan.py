"""Prefill scans on one GPU: Mamba2 (SSD) and the gated delta rule, and what checkpoints on the way cost.

    python -m benchmarks.gpu_kernels_scan [--state-dtype float32 bfloat16] [--parts] [--library]

Times of one layer's scan as in benchmarks/gpu_timing.py. A floor counts inputs and outputs once, the products that the
chunked form needs at our chunk size, no scratch. `--parts` adds the kernels one by one, with the scratch that each
reads and writes in its floor; `--library` adds, last, what others publish: mamba_ssm's scan (its Triton files are
enough) and flash-linear-attention's, with final states only, in float32 and without slots; their first call tunes
itself for a while.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.gpu_timing import HEADER, Row, measure
from benchmarks.shapes import SHAPES
from headrace.kernels.gdn import scan as gdn_scan
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan import gdn_prefill_triton, gdn_tiles
from headrace.kernels.gdn.systems import launch_systems
from headrace.kernels.lib.segments import PrefillSegments, StateWrite
from headrace.kernels.ssd import scan as ssd_scan
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.scan import ssd_prefill_triton, ssd_tiles
from headrace.models.config import GatedDeltaConfig, Mamba2Config

BF16 = torch.bfloat16
STATE_DTYPES = ("float32", "bfloat16")
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
        self.table = self.segments.chunk_table(_SSD.chunk_size)

    def scan(self) -> Run:
        inputs = self.x, self.dt, self.B, self.C
        return partial(ssd_prefill_triton, *inputs, self.heads, self.pool, self.segments, _SSD)

    def library(self) -> Run:
        """mamba_ssm's."""
        scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        inputs = self.x, self.heads.time_steps(self.dt), self.B, self.C
        x, dt, B, C = (each.unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        return partial(scan, x, dt, self.heads.A, B, C, 256, D=self.heads.D, return_final_states=True)

    def decays(self) -> Run:
        return partial(ssd_scan._launch_decays, self.dt, self.heads, self.table, _SSD)

    def states(self) -> Run:
        decay, chunk_dt = ssd_scan._launch_decays(self.dt, self.heads, self.table, _SSD)
        return partial(ssd_scan._launch_states, self.x, self.B, decay, chunk_dt, self.pool, self.table, _SSD)

    def outputs(self) -> Run:
        decay, chunk_dt = ssd_scan._launch_decays(self.dt, self.heads, self.table, _SSD)
        start = ssd_scan._launch_states(self.x, self.B, decay, chunk_dt, self.pool, self.table, _SSD)
        inputs, y = (self.x, self.B, self.C, self.heads.D, decay, chunk_dt, start), torch.empty_like(self.x)
        return partial(ssd_scan._launch_outputs, *inputs, y, self.table, _SSD)

    def costs(self) -> dict[str, tuple[float, float]]:
        """Bytes and FLOPs by what the methods above are called."""
        rows, H, Q, state = self.batch.rows, self.H, _SSD.chunk_size, self.H * self.P * self.N
        x_bytes, row_bytes, start_bytes = rows * H * self.P * 2, rows * H * 4, len(self.table.chunks_C4) * state * 2
        written_bytes = self.batch.num_writes * state * self.pool.itemsize
        within = Q * (H * self.P + self.N)  # the triangle only
        return {
            "scan": (2 * x_bytes + rows * (4 * self.N + 2 * H) + written_bytes, rows * (4 * state + within)),
            "decays": (3 * row_bytes, 0),
            "states": (x_bytes + start_bytes + 2 * row_bytes + written_bytes, 2 * rows * state),
            "outputs": (2 * x_bytes + start_bytes + 2 * row_bytes, rows * (2 * state + Q * H * self.P)),
        }


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
        self.table = self.segments.chunk_table(_GDN.chunk_size)

    def scan(self) -> Run:
        inputs = self.q, self.k, self.v, self.a, self.b
        return partial(gdn_prefill_triton, *inputs, self.heads, self.pool, self.segments, _GDN)

    def library(self) -> Run:
        """flash-linear-attention's."""
        scan = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        inputs = (self.q, self.k, self.v, *self.heads.gates(self.a, self.b))
        q, k, v, g, beta = (each.contiguous().unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        return partial(scan, q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def systems(self) -> Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]:
        inputs = self.k, self.v, self.a, self.b, self.heads, self.table
        return partial(launch_systems, *inputs, _GDN.chunk_size, _GDN.systems_warps, _GDN.systems_registers)

    def systems_states(self) -> Run:
        """V' replaces u: the states kernel cannot run twice on the same u, and the systems' time comes off by hand."""
        systems = self.systems()
        return lambda: gdn_scan._launch_states(self.k, *systems(), self.pool, self.table, _GDN)

    def outputs(self) -> Run:
        u, w, decay, to_end = self.systems()()
        start = gdn_scan._launch_states(self.k, u, w, decay, to_end, self.pool, self.table, _GDN)
        inputs, o = (self.q, self.k, u, decay, start), torch.empty_like(self.v)
        return partial(gdn_scan._launch_outputs, *inputs, o, self.table, _GDN)

    def costs(self) -> dict[str, tuple[float, float]]:
        """Bytes and FLOPs by what the methods above are called."""
        rows, H, Q, state = self.batch.rows, self.Hv, _GDN.chunk_size, self.Hv * self.K * self.V
        k_bytes, v_bytes, w_bytes = rows * self.Hk * self.K * 2, rows * H * self.V * 2, rows * H * self.K * 2
        start_bytes = len(self.table.chunks_C4) * state * 2
        written_bytes = self.batch.num_writes * state * self.pool.itemsize
        triangles = self.Hk * 2 * self.K + H * (self.K + 2 * self.V)  # k k, q k; w, u, outputs
        systems = rows * H * Q * (4 * self.K + 2 * self.V + 20 * Q)
        return {
            "scan": (2 * k_bytes + 2 * v_bytes + 4 * rows * H + written_bytes, rows * (6 * state + Q * triangles)),
            "systems": (k_bytes + 2 * v_bytes + w_bytes, systems),
            "systems_states": (
                2 * k_bytes + 4 * v_bytes + 2 * w_bytes + start_bytes + written_bytes,
                systems + 4 * rows * state,
            ),
            "outputs": (
                2 * k_bytes + 2 * v_bytes + start_bytes,
                rows * (2 * state + 2 * Q * (H * self.V + self.Hk * self.K)),
            ),
        }


LAYERS: dict[str, tuple[type[SsdLayer | GdnLayer], str]] = {
    "ssd": (SsdLayer, "mamba_ssm"),
    "gdn": (GdnLayer, "flash-linear-attention"),
}


def row(name: str, layer: type[SsdLayer | GdnLayer], batch: Batch, state_dtype: torch.dtype, part: str) -> Row:
    num_bytes, flops = layer(batch, state_dtype).costs()["scan" if part == "library" else part]
    shape = f"{batch} in {str(state_dtype)[6:]}"
    return measure(name, shape, lambda: getattr(layer(batch, state_dtype), part)(), num_bytes, flops)


@torch.no_grad()
def rows(state_dtypes: Sequence[torch.dtype], parts: bool, library: bool) -> Iterator[Row]:
    for name, (layer, _) in LAYERS.items():
        for state_dtype in state_dtypes:
            for batch in BATCHES + CHECKPOINTED:
                for part in layer(batch, state_dtype).costs() if parts and batch in BATCHES else ("scan",):
                    yield row(f"{name} {part}", layer, batch, state_dtype, part)
    for layer, name in LAYERS.values() if library else ():
        for batch in BATCHES:
            yield row(name, layer, batch, torch.float32, "library")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dtype", nargs="+", choices=STATE_DTYPES, default=STATE_DTYPES, help="of the pools")
    parser.add_argument("--parts", action="store_true", help="the kernels one by one, too")
    parser.add_argument("--library", action="store_true", help="what others publish, too")
    arguments = parser.parse_args()
    print(HEADER)
    state_dtypes = [getattr(torch, name) for name in arguments.state_dtype]
    for each in rows(state_dtypes, arguments.parts, arguments.library):
        print(each, flush=True)


if __name__ == "__main__":
    main()
