"""A transfer between two GPUs: the whole, its parts, and what others move over the same link.

    python3 -m benchmarks transfer-gpu                                # two GPUs, or two processes on one
    python3 -m benchmarks transfer-gpu --devices cpu cpu --mib 8      # no GPU: that it runs

A transfer is timed from a computed prompt to its last landing: gather, digest, send, digest, scatter, with a session
around them. One at a time is a latency; several at once are what a busy node sees. The bytes that arrive are compared
with those that left. NIXL is measured if `nixl_cu13` can be imported.
"""

import statistics
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

import torch
import typer

from benchmarks.timing import table_header, table_row
from benchmarks.transfer import nixl
from benchmarks.transfer.ends import Ends, Shape, Took, shape_of
from transfer.protocol.plan import TransferPlan

BLOCKS, BLOCK_BYTES = 1024, 64 << 10
SMALL_STATE_BYTES = 4096
AT_ONCE = (1, 2, 4, 8, 16)
BATCHES = 7


def line(what: str, at_once: int, seconds: float, num_bytes: float, host_s: float | None = None) -> str:
    host = "" if host_s is None else f"{host_s * 1e6:.0f}"
    return table_row(what, at_once, f"{seconds * 1e6:.0f}", f"{num_bytes / seconds / 1e9:.1f}", host)


def shape_rows(
    devices: tuple[str, str], what: str, shape: Shape, first_block: int, rounds: int, bare: bool
) -> Iterator[str]:
    """Transfers in one message each, one at a time and several at once, their parts, and `bare` messages as long."""
    with Ends(*devices, shape, num_buffers=2 * max(AT_ONCE)) as ends:
        plan = shape.plan(first_block=first_block, max_message_bytes=shape.num_bytes)
        for at_once in AT_ONCE:
            took = transfer(ends, plan, rounds, at_once)
            host_s = max(took.prefill_host_s, took.decode_host_s)
            yield line(what, at_once, took.seconds, plan.total_bytes, host_s)
        if not ends.arrived():
            raise AssertionError(f"{what}: what arrived is not what left")
        for part, seconds in ends.parts(plan, rounds).items():
            yield line(f"{what}: {part}, as the event loop waits for it", 1, seconds, plan.total_bytes)
        for at_once in (1, 4) if bare else ():
            seconds = ends.sends(plan.total_bytes, rounds * at_once, at_once)
            yield line("a bare message of as many bytes", at_once, seconds, plan.total_bytes)
        yield f"<!-- {ends.describe()} -->"


def transfer(ends: Ends, plan: TransferPlan, rounds: int, at_once: int) -> Took:
    """Medians, each its own; several at once are over in a tenth of a second, so that takes more than one batch."""
    if at_once == 1:
        each = ends.one_at_a_time(plan, rounds)
    else:
        each = [ends.in_flight(plan, rounds * at_once, at_once) for _ in range(BATCHES)]
    return Took(*(statistics.median(getattr(one, field.name) for one in each) for field in fields(Took)))


def copy_row(devices: tuple[str, str], num_bytes: int, rounds: int) -> str:
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return line("torch's copy from device to device", 1, begin.elapsed_time(end) / 1e3 / rounds, num_bytes)


def nixl_rows(devices: tuple[str, str], rounds: int) -> Iterator[str]:
    """NIXL's rows; a failure of NIXL is reported and costs no other row."""
    try:
        for row in nixl.rows(devices, BLOCKS, BLOCK_BYTES, rounds):
            yield line(f"NIXL, a write in {row.pieces} pieces", 1, row.seconds, row.num_bytes)
    except nixl.NixlFailed as why:
        yield f"<!-- NIXL: {why} -->"


def table(devices: tuple[str, str], total: int, rounds: int) -> Iterator[str]:
    yield f"{devices[0]} to {devices[1]}, {total >> 20} MiB\n"
    yield table_header("what", "at once", "us", "GB/s", "host us, the busier end")
    blocks = shape_of(total // BLOCK_BYTES, BLOCK_BYTES, SMALL_STATE_BYTES)
    yield from shape_rows(devices, f"{blocks.num_blocks:,} x {BLOCK_BYTES >> 10} KiB", blocks, 0, rounds, bare=True)
    yield from shape_rows(devices, "a state", shape_of(1, 4096, total), 1, rounds, bare=False)
    if devices[0].startswith("cuda"):
        yield from nixl_rows(devices, rounds)
        yield copy_row(devices, total, rounds)


def main(
    devices: Annotated[tuple[str, str] | None, typer.Option(help="prefill and decode; default: the first GPUs")] = None,
    mib: Annotated[int, typer.Option(help="of a transfer's blocks, and of a state")] = 64,
    rounds: int = 30,
) -> None:
    """A transfer between two GPUs, its parts, and NIXL beside it."""
    num_gpus = torch.cuda.device_count()
    if devices is None and num_gpus == 0:
        print("no CUDA device here: `--devices cpu cpu --mib 8` shows that it runs")
        return
    for row in table(devices or ("cuda:0", f"cuda:{min(1, num_gpus - 1)}"), mib << 20, rounds):
        print(row, flush=True)
