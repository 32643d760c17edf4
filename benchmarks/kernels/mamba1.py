"""Mamba1's kernels on one GPU, at the sizes of Jamba 1.5 mini and Jamba2 3B: prefill scans and decode updates.

    python3 -m benchmarks kernels-mamba1 [--only scan ...]

Times of one layer. The floor counts inputs, outputs and states once; a scan's shape also says how long its
exponentials take, one for each state and row, at 16 a clock on each of an H200's multiprocessors: the larger one binds.
Where mamba_ssm is installed (its Triton files are enough), its update has rows, too, and with its CUDA kernels its
scan: final states only, without slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.kernels.state import BATCHES, BF16, FP32, PROMPTS, Batch, Run, in_place, random, state_layer
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.mamba1.channels import Mamba1Channels
from headrace.kernels.mamba1.scan import mamba1_prefill_triton
from headrace.kernels.mamba1.update import mamba1_update_triton

EXPONENTIALS_A_SECOND = 132 * 16 * 1.75e9
WIDTHS = {"Jamba 1.5 mini": 8192, "Jamba2 3B": 5120}
N = 16


Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Mamba1Channels]


def layer(width: int, rows: int) -> Layer:
    """Inputs as the model passes them, and the channels' parameters."""
    A = -torch.empty(width, N, device="cuda").uniform_(0.5, 16.0)
    D, bias = torch.randn(2, width, device="cuda")
    B, C = random(rows, 2 * N).split(N, dim=-1)
    gate = random(rows, 2 * width)[:, width:]
    return random(rows, width), random(rows, width), B, C, gate, Mamba1Channels(A, D, bias - 4)


@dataclass(frozen=True)
class Scan:
    width: int
    batch: Batch

    def ours(self) -> Run:
        inputs = layer(self.width, self.batch.rows)
        pool = torch.empty(self.batch.num_writes, 2, self.width, N, device="cuda")[:, 1]
        return partial(mamba1_prefill_triton, *inputs, pool, self.batch.segments())

    def published(self) -> Run:
        """The scan of mamba_ssm, which wants rows last."""
        scan = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
        *inputs, channels = layer(self.width, self.batch.rows)
        x, dt, B, C, gate = (
            each.unflatten(0, (self.batch.num_sequences, -1)).transpose(1, 2).contiguous() for each in inputs
        )
        rest = {"z": gate, "delta_bias": channels.dt_bias, "delta_softplus": True, "return_last_state": True}
        return partial(scan, x, dt, channels.A, B, C, channels.D, **rest)

    def num_bytes(self) -> float:
        return self.batch.rows * (8 * self.width + 4 * N) + self.batch.num_writes * self.width * N * 4

    def exponentials_us(self) -> float:
        return self.batch.rows * self.width * N / EXPONENTIALS_A_SECOND * 1e6


def scans() -> Iterator[Row]:
    for model, width in WIDTHS.items():
        for batch in PROMPTS:
            scan = Scan(width, batch)
            shape = f"{model}, {batch}, exponentials {scan.exponentials_us():.0f} us"
            yield measure("mamba1 scan", shape, scan.ours, scan.num_bytes())
            if find_spec("selective_scan_cuda"):
                yield measure("mamba1 scan, mamba_ssm's", shape, scan.published, scan.num_bytes())


def updates() -> Iterator[Row]:
    def step(width: int, batch: int, dtype: torch.dtype) -> Run:
        pool = state_layer(batch, width, N, dtype=dtype)
        return partial(mamba1_update_triton, *layer(width, batch), pool, *in_place(batch))

    def published(width: int, batch: int, dtype: torch.dtype) -> Run:
        """The update of mamba_ssm, in place in the same slots."""
        update = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
        x, dt, B, C, gate, channels = layer(width, batch)
        rest = {"z": gate, "dt_bias": channels.dt_bias, "dt_softplus": True}
        rest["state_batch_indices"] = torch.randperm(batch, device="cuda").int()
        return partial(update, state_layer(batch, width, N, dtype=dtype), x, dt, channels.A, B, C, channels.D, **rest)

    kinds = {"mamba1_update": step} | ({"mamba1_update, mamba_ssm's": published} if find_spec("mamba_ssm") else {})
    for model, width in WIDTHS.items():
        for dtype in (FP32, BF16):
            for batch in BATCHES:
                num_bytes = width * N * 4 + batch * (2.0 * width * N * dtype.itemsize + 8 * width + 4 * N)
                shape = f"{model}, {batch} states in {str(dtype)[6:]}"
                for name, kind in kinds.items():
                    yield measure(name, shape, partial(kind, width, batch, dtype), num_bytes)


main = kernel_command({"scan": scans, "update": updates}, "Mamba1's scans and updates.")
