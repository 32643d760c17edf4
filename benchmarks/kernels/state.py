"""Kernels of state layers and of transfers on one GPU: prefill scans, decode updates, convolutions, gather and scatter.

    python3 -m benchmarks kernels-scan [--only ssd ...]
    python3 -m benchmarks kernels-state [--only conv ...]

Times of one layer. A scan's floor counts inputs and outputs once and the products that the chunked form needs at our
chunk size, no scratch; an update's counts a state twice, read and written. Where mamba_ssm (its Triton files are
enough) or flash-linear-attention is installed, its scan has rows, too: final states only, in float32, without slots;
its first call tunes for a while. So has the latter's update of Kimi delta attention, in place in slots.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.conv import prefill as causal_conv1d
from headrace.kernels.conv.update import causal_conv1d_update_triton
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan import gdn_prefill_triton, gdn_tiles
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.scan import kda_prefill_triton, kda_tiles
from headrace.kernels.kda.update import kda_update_triton
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.scan import ssd_prefill_triton, ssd_tiles
from headrace.kernels.transfer.gather_scatter import gather_rows_triton, scatter_rows_triton
from headrace.models.config import GatedDeltaConfig, Mamba2Config

BF16, FP32 = torch.bfloat16, torch.float32
Run = Callable[[], object]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


# ---------------------------------------------------------------- prefill scans


@dataclass(frozen=True)
class Batch:
    """Fresh sequences of equal length, each with `checkpoints` evenly spaced states, the last at its end."""

    num_sequences: int
    length: int
    checkpoints: int = 1

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.length}, {self.checkpoints} states"

    @property
    def rows(self) -> int:
        return self.num_sequences * self.length

    @property
    def num_writes(self) -> int:
        return self.num_sequences * self.checkpoints

    def segments(self) -> PrefillSegments:
        spacing = self.length // self.checkpoints
        writes = [
            StateWrite(sequence, (i + 1) * spacing, sequence * self.checkpoints + i)
            for sequence in range(self.num_sequences)
            for i in range(self.checkpoints)
        ]
        sources = [None] * self.num_sequences
        return PrefillSegments.build([self.length] * self.num_sequences, sources, writes, torch.device("cuda"))


PROMPTS = [Batch(1, 2048), Batch(1, 8192), Batch(16, 4096), Batch(1, 32768)]
CHECKPOINTED = Batch(1, 32768, 64)

_SSD, _GDN, _KDA = ssd_tiles(BF16, 64, 128, 8192), gdn_tiles(BF16), kda_tiles(BF16)


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

    def published_scan(self) -> Run:
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
        self.Hk, self.K = Hk, K = config.num_key_heads, config.key_dim
        self.Hv, self.V = Hv, V = config.num_value_heads, config.value_dim
        widths = Hk * K, Hk * K, Hv * V, Hv, Hv
        q, k, v, self.b, self.a = torch.randn(batch.rows, sum(widths), device="cuda", dtype=BF16).split(widths, dim=-1)
        self.q, self.k, self.v = (x.unflatten(1, (heads, -1)) for x, heads in ((q, Hk), (k, Hk), (v, Hv)))
        self.heads = GdnHeads(-torch.rand(Hv, device="cuda"), torch.randn(Hv, device="cuda"))
        self.pool = torch.empty(batch.num_writes, 2, Hv, K, V, device="cuda", dtype=state_dtype)[:, 1]

    def scan(self) -> Run:
        inputs = self.q, self.k, self.v, self.a, self.b
        return partial(gdn_prefill_triton, *inputs, self.heads, self.pool, self.segments, _GDN)

    def published_scan(self) -> Run:
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


class KdaLayer:
    """One layer of Kimi-Linear-48B-A3B, its inputs and pool made anew."""

    def __init__(self, batch: Batch, state_dtype: torch.dtype) -> None:
        self.batch, self.segments = batch, batch.segments()
        self.H, self.D = H, D = 32, 128
        u = random(batch.rows, 3 * H * D).unflatten(1, (3 * H, D))
        self.q, self.k, self.v = u.split(H, dim=1)
        self.f, self.b = random(batch.rows, H, D), random(batch.rows, 2 * D + H)[:, 2 * D :]
        self.heads = KdaHeads(-torch.rand(H, device="cuda"), torch.randn(H, D, device="cuda"))
        self.pool = torch.empty(batch.num_writes, 2, H, D, D, device="cuda", dtype=state_dtype)[:, 1]

    def scan(self) -> Run:
        inputs = self.q, self.k, self.v, self.f, self.b
        return partial(kda_prefill_triton, *inputs, self.heads, self.pool, self.segments, _KDA)

    def published_scan(self) -> Run:
        """The scan of flash-linear-attention."""
        scan = import_module("fla.ops.kda").chunk_kda
        inputs = (self.q, self.k, self.v, *self.heads.gates(self.f, self.b))
        q, k, v, g, beta = (each.contiguous().unflatten(0, (self.batch.num_sequences, -1)) for each in inputs)
        return partial(scan, q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def cost(self) -> tuple[float, float]:
        """Bytes and FLOPs of the scan; the scores as if all channels decayed alike."""
        rows, size, state = self.batch.rows, self.H * self.D, self.H * self.D * self.D
        num_bytes = 2 * rows * (5 * size + self.H) + self.batch.num_writes * state * self.pool.itemsize
        return num_bytes, rows * (6 * state + _KDA.chunk_size * 5 * size)


def scans(layer: type[SsdLayer | GdnLayer | KdaLayer], name: str, publisher: str) -> Iterator[Row]:
    def row(name: str, batch: Batch, state_dtype: torch.dtype, scan: Callable[..., Run]) -> Row:
        num_bytes, flops = layer(batch, state_dtype).cost()
        prepare = lambda: scan(layer(batch, state_dtype))  # noqa: E731
        return measure(name, f"{batch} in {str(state_dtype)[6:]}", prepare, num_bytes, flops)

    for state_dtype in (FP32, BF16):
        for batch in [*PROMPTS, CHECKPOINTED]:
            yield row(name, batch, state_dtype, layer.scan)
    for batch in PROMPTS if find_spec(publisher) else ():
        yield row(f"{name}, {publisher}'s", batch, FP32, layer.published_scan)


# ---------------------------------------------------------------- decode updates, convolutions and copies

BATCHES = (1, 16, 64, 256)
CONV_WIDTHS = {"granite-h-micro": (4352, 8512, True), "qwen35-4b": (8192, 12352, False)}


def state_layer(batch: int, *state: int, dtype: torch.dtype) -> Tensor:
    """One of two layers of a pool of as many states as the batch has sequences."""
    return random(batch, 2, *state, dtype=dtype)[:, 1]


def in_place(batch: int) -> tuple[StateSource, Tensor]:
    """Every sequence keeps the slot it has; the slots are in no order."""
    slots = torch.randperm(batch).tolist()
    return StateSource.of(slots, torch.device("cuda")), torch.tensor(slots, device="cuda")


def kda_updates() -> Iterator[Row]:
    H, D = 32, 128

    def step(batch: int, dtype: torch.dtype) -> Run:
        q, k, v = random(batch, 3 * H, D).split(H, dim=1)
        heads = KdaHeads(-torch.rand(H, device="cuda"), torch.randn(H, D, device="cuda"))
        rows = q, k, v, random(batch, H, D), random(batch, H + 2 * D)[:, 2 * D :], heads
        return partial(kda_update_triton, *rows, state_layer(batch, H, D, D, dtype=dtype), *in_place(batch))

    def published(batch: int, dtype: torch.dtype) -> Run:
        """The update of flash-linear-attention, in place in slots as its continuous batching has them."""
        update = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        q, k, v, f = random(4, batch, 1, H, D).unbind(0)  # contiguous, as it wants them
        gates = {"A_log": torch.randn(H, device="cuda"), "dt_bias": torch.randn(H * D, device="cuda")}
        pool, slots = state_layer(batch, H, D, D, dtype=dtype), torch.randperm(batch, device="cuda").int()
        rows = (each.transpose(0, 1) for each in (q, k, v, f, random(batch, 1, H)))  # one row of many sequences
        ends = torch.arange(batch + 1, device="cuda")
        flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
        return partial(update, *rows, initial_state=pool, cu_seqlens=ends, ssm_state_indices=slots, **gates, **flags)

    kinds = {"kda_update": step} | ({"kda_update, fla's": published} if find_spec("fla") else {})
    for dtype in (FP32, BF16):
        for batch in BATCHES:
            num_bytes = batch * (2.0 * H * D * D * dtype.itemsize + 10 * H * D + 2 * H)
            shape = f"Kimi, {batch} states in {str(dtype)[6:]}"
            for name, kind in kinds.items():
                yield measure(name, shape, partial(kind, batch, dtype), num_bytes)


def conv_updates() -> Iterator[Row]:
    def step(batch: int, channels: int, width: int, has_bias: bool) -> Run:
        u, bias = random(batch, width)[:, width - channels - 64 : width - 64], random(channels) if has_bias else None
        pool = state_layer(batch, channels, 3, dtype=BF16)
        return partial(causal_conv1d_update_triton, u, random(channels, 4), bias, pool, *in_place(batch))

    for model, widths in CONV_WIDTHS.items():
        for batch in BATCHES:
            num_bytes, shape = batch * widths[0] * 2.0 * (3 + 3 + 1 + 1), f"{model}, {batch} sequences"
            yield measure("causal_conv1d_update", shape, partial(step, batch, *widths), num_bytes)


def convs() -> Iterator[Row]:
    def pack(length: int, channels: int, width: int, has_bias: bool) -> Run:
        """A fresh sequence that leaves a window every 1,024 rows."""
        writes = [StateWrite(0, rows, slot) for slot, rows in enumerate(range(1024, length + 1, 1024))]
        segments = PrefillSegments.build([length], [None], writes, torch.device("cuda"))
        pool = state_layer(len(writes), channels, 3, dtype=BF16)
        u, bias = random(length, width)[:, :channels], random(channels) if has_bias else None
        # The table is a step's, not a layer's: made before the clock runs.
        segments.conv_table(4, causal_conv1d.launch_shape(channels)[0])
        return partial(causal_conv1d.causal_conv1d_triton, u, random(channels, 4), bias, pool, segments)

    for model, widths in CONV_WIDTHS.items():
        for length in (2048, 8192):
            num_bytes = length * widths[0] * 4.0
            yield measure("causal_conv1d", f"{model}, 1 x {length} rows", partial(pack, length, *widths), num_bytes)


def copies() -> Iterator[Row]:
    def blocks(copy: Callable[[Tensor, Tensor, Tensor], None], count: int, row_bytes: int) -> Run:
        pool = torch.randint(0, 256, (4 * count, row_bytes), dtype=torch.uint8, device="cuda")
        staging = torch.randint(0, 256, (count * row_bytes,), dtype=torch.uint8, device="cuda")
        return partial(copy, pool, torch.randperm(4 * count, device="cuda")[:count], staging)

    for count, row_bytes in [(1024, 65536), (1, 36 << 20)]:  # blocks; a state of granite-h-micro in bfloat16
        for copy in (gather_rows_triton, scatter_rows_triton):
            shape, prepare = f"{count} x {row_bytes:,} bytes", partial(blocks, copy, count, row_bytes)
            yield measure(copy.__name__, shape, prepare, 2.0 * count * row_bytes)


scan_kernels = kernel_command(
    {
        "ssd": partial(scans, SsdLayer, "ssd scan", "mamba_ssm"),
        "gdn": partial(scans, GdnLayer, "gdn scan", "fla"),
        "kda": partial(scans, KdaLayer, "kda scan", "fla"),
    },
    "Prefill scans: Mamba2 (SSD), the gated delta rule, Kimi delta attention.",
)
state_kernels = kernel_command(
    {
        "kda": kda_updates,
        "conv-update": conv_updates,
        "conv": convs,
        "copy": copies,
    },
    "State updates, convolutions, gather and scatter.",
)
