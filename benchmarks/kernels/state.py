"""Decode state updates, causal convolutions, and gathering and scattering of blocks on one GPU.

    python3 -m benchmarks kernels-state [--library] [--only ssd ...]

A state counts twice, read and written. `--library` adds torch beside the copies.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.conv import prefill as causal_conv1d
from headrace.kernels.conv import update as causal_conv1d_update
from headrace.kernels.gdn import update as gdn_update
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from headrace.kernels.ssd import update as ssd_update
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.transfer import gather_scatter

BF16, FP32 = torch.bfloat16, torch.float32
BATCHES = (1, 16, 64, 256)
CONV_WIDTHS = {"granite-h-micro": (4352, 8512, True), "qwen35-4b": (8192, 12352, False)}


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def state_layer(batch: int, *state: int, dtype: torch.dtype) -> Tensor:
    """One of two layers of a pool of as many states as the batch has sequences."""
    return random(batch, 2, *state, dtype=dtype)[:, 1]


def in_place(batch: int) -> tuple[StateSource, Tensor]:
    """Every sequence goes on in the slot it has, in no order."""
    slots = torch.randperm(batch).tolist()
    return StateSource.of(slots, torch.device("cuda")), torch.tensor(slots, device="cuda")


def ssd_rows(library: bool) -> Iterator[Row]:
    H, P, N = 64, 64, 128

    def step(batch: int, dtype: torch.dtype) -> Callable[[], object]:
        x, B, C = random(batch, H * P + 2 * N).split((H * P, N, N), dim=-1)
        D, bias = torch.randn(2, H, device="cuda")
        heads = SsdHeads(-torch.rand(H, device="cuda"), D, bias)
        rows = x.view(batch, H, P), random(batch, 8512)[:, -H:], B.view(batch, 1, N), C.view(batch, 1, N), heads
        return partial(ssd_update.ssd_update_triton, *rows, state_layer(batch, H, P, N, dtype=dtype), *in_place(batch))

    for dtype in (FP32, BF16):
        for batch in BATCHES:
            num_bytes = batch * (2.0 * H * P * N * dtype.itemsize + 4 * H * P + 4 * N + 2 * H)
            shape = f"granite-h-micro, {batch} states in {str(dtype)[6:]}"
            yield measure("ssd_update", shape, partial(step, batch, dtype), num_bytes)


def gdn_rows(library: bool) -> Iterator[Row]:
    Hk, Hv, D = 16, 32, 128

    def step(batch: int, dtype: torch.dtype) -> Callable[[], object]:
        q, k, v = random(batch, (2 * Hk + Hv) * D).split((Hk * D, Hk * D, Hv * D), dim=-1)
        b, a = random(batch, 12352)[:, -2 * Hv :].split(Hv, dim=-1)
        heads = GdnHeads(-torch.rand(Hv, device="cuda"), torch.randn(Hv, device="cuda"))
        rows = q.view(batch, Hk, D), k.view(batch, Hk, D), v.view(batch, Hv, D), a, b, heads
        return partial(gdn_update.gdn_update_triton, *rows, state_layer(batch, Hv, D, D, dtype=dtype), *in_place(batch))

    for dtype in (FP32, BF16):
        for batch in BATCHES:
            num_bytes = batch * (2.0 * Hv * D * D * dtype.itemsize + 4 * Hk * D + 4 * Hv * D + 4 * Hv)
            shape = f"qwen35-4b, {batch} states in {str(dtype)[6:]}"
            yield measure("gdn_update", shape, partial(step, batch, dtype), num_bytes)


def conv_update_rows(library: bool) -> Iterator[Row]:
    def step(batch: int, channels: int, width: int, has_bias: bool) -> Callable[[], object]:
        u, bias = random(batch, width)[:, width - channels - 64 : width - 64], random(channels) if has_bias else None
        pool = state_layer(batch, channels, 3, dtype=BF16)
        run = causal_conv1d_update.causal_conv1d_update_triton
        return partial(run, u, random(channels, 4), bias, pool, *in_place(batch))

    for model, shape in CONV_WIDTHS.items():
        for batch in BATCHES:
            num_bytes = batch * shape[0] * 2.0 * (3 + 3 + 1 + 1)
            yield measure(
                "causal_conv1d_update", f"{model}, {batch} sequences", partial(step, batch, *shape), num_bytes
            )


def conv_rows(library: bool) -> Iterator[Row]:
    def pack(count: int, length: int, channels: int, width: int, has_bias: bool) -> Callable[[], object]:
        """Every sequence is fresh and leaves a window every 1,024 rows and one at its end."""
        ends = [(i, rows) for i in range(count) for rows in range(min(1024, length), length + 1, 1024)]
        writes = [StateWrite(i, rows, slot) for slot, (i, rows) in enumerate(ends)]
        segments = PrefillSegments.build([length] * count, [None] * count, writes, torch.device("cuda"))
        pool = state_layer(len(writes), channels, 3, dtype=BF16)
        u, bias = random(count * length, width)[:, :channels], random(channels) if has_bias else None
        # The table is a step's, not a layer's: made before the clock runs.
        segments.conv_table(4, causal_conv1d.launch_shape(channels)[0])
        return partial(causal_conv1d.causal_conv1d_triton, u, random(channels, 4), bias, pool, segments)

    for model, shape in CONV_WIDTHS.items():
        for count, length in [(1, 2048), (1, 8192), (16, 4096), (64, 100)]:
            num_bytes, name = count * length * shape[0] * 4.0, f"{model}, {count} x {length} rows"
            prepare = partial(pack, count, length, *shape)
            yield measure("causal_conv1d", name, prepare, num_bytes)


def copy_rows(library: bool) -> Iterator[Row]:
    def blocks(copy: Callable[[Tensor, Tensor, Tensor], None], count: int, row_bytes: int) -> Callable[[], object]:
        pool = torch.randint(0, 256, (4 * count, row_bytes), dtype=torch.uint8, device="cuda")
        staging = torch.randint(0, 256, (count * row_bytes,), dtype=torch.uint8, device="cuda")
        return partial(copy, pool, torch.randperm(4 * count, device="cuda")[:count], staging)

    implementations = [gather_scatter.gather_rows_triton, gather_scatter.scatter_rows_triton]
    if library:
        implementations += [gather_scatter.gather_rows_torch, gather_scatter.scatter_rows_torch]
    # Blocks of 64 KiB; then one recurrent state of granite-h-micro in bfloat16, and odd bytes.
    for count, row_bytes in [(1024, 65536), (64, 65536), (1, 36 << 20), (1024, 65536 - 4)]:
        for copy in implementations:
            shape, prepare = f"{count} x {row_bytes:,} bytes", partial(blocks, copy, count, row_bytes)
            yield measure(copy.__name__, shape, prepare, 2.0 * count * row_bytes)


KINDS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "ssd": ssd_rows,
    "gdn": gdn_rows,
    "conv-update": conv_update_rows,
    "conv": conv_rows,
    "copy": copy_rows,
}
main = kernel_command(KINDS, "State updates, convolutions, gather and scatter.")
