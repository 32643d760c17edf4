"""A transfer between two GPUs: the whole, its parts, and what others move over the same link.

    python3 -m benchmarks transfer-gpu [--quick]                      # two GPUs, or two processes on one
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

from benchmarks.shapes import SHAPES
from benchmarks.timing import HEADER as KERNEL_HEADER
from benchmarks.timing import Row, measure
from benchmarks.transfer import nixl
from benchmarks.transfer.ends import Ends, Shape, Took, shape_of
from headrace.kernels.transfer.digest import DIGEST_BYTES, digest_pages
from headrace.kernels.transfer.gather_scatter import gather_rows, scatter_rows
from transfer.protocol.digest import PAGE_BYTES
from transfer.protocol.plan import TransferPlan

BLOCKS, BLOCK_BYTES = 1024, 64 << 10
SHORTER_MIB = (32, 16, 8)
SEND_MIB = (1, 4, 8, 16, 32, 64, 128, 256)
AT_ONCE = (1, 2, 4, 8, 16)
BATCHES = 7
NUM_BUFFERS = 2 * max(AT_ONCE)
ROUNDS = 30
MODEL, MODEL_TOKENS = "granite-h-micro", 8192

HEADER = "| what | messages | at once | us | GB/s |\n|---|---|---:|---:|---:|"


def line(what: str, messages: str, at_once: int, seconds: float, num_bytes: float) -> str:
    return f"| {what} | {messages} | {at_once} | {seconds * 1e6:.0f} | {num_bytes / seconds / 1e9:.1f} |"


def transfer_rows(ends: Ends, what: str, plans: dict[str, TransferPlan], rounds: int) -> Iterator[str]:
    """Rows of every plan, one at a time and several at once; `plans` by the name of their messages."""
    for messages, plan in plans.items():
        for at_once in AT_ONCE:
            if at_once == 1:
                each = ends.one_at_a_time(plan, rounds)
            else:  # one is over in a tenth of a second, in which the host may be somebody else's
                each = [ends.in_flight(plan, rounds * at_once, at_once) for _ in range(BATCHES)]
            took = Took(*(statistics.median(getattr(one, field.name) for one in each) for field in fields(Took)))
            yield line(what, messages, at_once, took.seconds, plan.total_bytes)
            for end, host_s in (("prefill", took.prefill_host_s), ("decode", took.decode_host_s)):
                yield line(f"{what}: host time of the {end} end", messages, at_once, host_s, plan.total_bytes)
        if not ends.arrived():
            raise AssertionError(f"{what}, {messages}: what arrived is not what left")


def send_rows(ends: Ends, largest: int, rounds: int, what: str) -> Iterator[str]:
    for mib in SEND_MIB:
        if mib << 20 <= largest:
            for at_once in (1, 4):
                seconds = ends.sends(mib << 20, rounds * at_once, at_once)
                yield line(what, f"{mib} MiB", at_once, seconds, mib << 20)


def part_rows(ends: Ends, what: str, plan: TransferPlan, rounds: int) -> Iterator[str]:
    for part, seconds in ends.parts(plan, rounds).items():
        yield line(f"{what}: {part}, as the event loop waits for it", "1", 1, seconds, plan.messages[0].num_bytes)


def copy_rows(devices: tuple[str, str], num_bytes: int, rounds: int) -> Iterator[str]:
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    yield line("torch's copy from device to device", f"{num_bytes >> 20} MiB", 1,
               begin.elapsed_time(end) / 1e3 / rounds, num_bytes)  # fmt: skip


def kernel_rows() -> Iterator[Row]:
    """The kernels of both ends alone on an idle device, with inputs outside its cache."""
    total = BLOCKS * BLOCK_BYTES
    pool = torch.zeros((4 * BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    rows = torch.randperm(4 * BLOCKS, device="cuda")

    def staging() -> torch.Tensor:
        return torch.zeros(total, dtype=torch.uint8, device="cuda")

    def copying(copy):
        def prepare():
            buffer, blocks = staging(), rows[torch.randperm(4 * BLOCKS, device="cuda")[:BLOCKS]]
            return lambda: copy(pool, blocks, buffer)

        return prepare

    shape = f"{BLOCKS:,} x {BLOCK_BYTES >> 10} KiB"
    yield measure("gather", shape, copying(gather_rows), 2 * total)
    yield measure("scatter", shape, copying(scatter_rows), 2 * total)

    def hashing():
        buffer = staging().view(torch.int64).view(-1, PAGE_BYTES // 8)
        digests = torch.empty(len(buffer) * DIGEST_BYTES // 8, dtype=torch.int64, pin_memory=True)
        return lambda: digest_pages(buffer, digests, buffer.nbytes)

    yield measure("digest", f"{total >> 20} MiB", hashing, total)


def blocks_shape(total: int) -> Shape:
    """Blocks of `total` bytes together, and a state of 4 KiB."""
    return shape_of(total // BLOCK_BYTES, BLOCK_BYTES, 4096)


def model_shape(total: int) -> Shape:
    """A real model's prompt of MODEL_TOKENS for a `total` of 64 MiB, in proportion for others."""
    layout = SHAPES[MODEL].cache_layout("bench", "bfloat16", 16, state_dtype="bfloat16")
    return Shape(layout, MODEL_TOKENS // layout.block_size * total >> 26)


def main(
    devices: Annotated[tuple[str, str] | None, typer.Option(help="prefill and decode; default: the first GPUs")] = None,
    mib: Annotated[int, typer.Option(help="of a transfer's blocks, and of a state")] = 64,
    rounds: int = ROUNDS,
    quick: Annotated[bool, typer.Option("--quick", help="under a minute: the figures asked for, and NIXL")] = False,
) -> None:
    """A transfer between two GPUs, its parts, and NIXL beside it."""
    num_gpus = torch.cuda.device_count()
    if devices is None and num_gpus == 0:
        print("no CUDA device here: `--devices cpu cpu --mib 8` shows that it runs")
        return
    for row in table(devices or ("cuda:0", f"cuda:{min(1, num_gpus - 1)}"), mib << 20, rounds, quick):
        print(row, flush=True)


def table(devices: tuple[str, str], total: int, rounds: int, quick: bool) -> Iterator[str]:
    """Rows of the table; the comparison comes first, so that a run cut short has it."""
    on_gpu = devices[0].startswith("cuda")
    yield f"{devices[0]} to {devices[1]}\n\n{HEADER}"
    yield from blocks_rows(devices, total, rounds, quick)
    yield from state_rows(devices, total, rounds)
    if on_gpu:
        yield from nixl_rows(devices, rounds)
        yield from copy_rows(devices, total, rounds)
    if quick:
        return
    yield from model_rows(devices, total, rounds)
    if on_gpu:
        yield f"\n{KERNEL_HEADER}"
        yield from (str(row) for row in kernel_rows())


def blocks_rows(devices: tuple[str, str], total: int, rounds: int, quick: bool) -> Iterator[str]:
    """Blocks in messages of several sizes, and bare messages."""
    longest = total if quick or not devices[0].startswith("cuda") else 4 * total
    shape = blocks_shape(total)
    with Ends(*devices, shape, num_buffers=NUM_BUFFERS, buffer_bytes=longest) as ends:
        plans = {"1": shape.plan(max_message_bytes=shape.num_bytes)}
        if not quick:
            shorter = (mib for mib in SHORTER_MIB if mib << 20 < total)
            plans |= {f"{mib} MiB": shape.plan(max_message_bytes=mib << 20) for mib in shorter}
        yield from transfer_rows(ends, f"{shape.num_blocks:,} x {BLOCK_BYTES >> 10} KiB", plans, rounds)
        yield from part_rows(ends, "blocks", plans["1"], rounds)
        yield from send_rows(ends, longest, rounds, "a message alone")
        yield f"<!-- {ends.describe()} -->"


def state_rows(devices: tuple[str, str], total: int, rounds: int) -> Iterator[str]:
    shape = shape_of(1, 4096, total)
    with Ends(*devices, shape, num_buffers=NUM_BUFFERS) as ends:
        plan = shape.plan(first_block=1, max_message_bytes=total)
        yield from transfer_rows(ends, f"a state of {total >> 20} MiB", {"1": plan}, rounds)
        yield from part_rows(ends, "state", plan, rounds)


def model_rows(devices: tuple[str, str], total: int, rounds: int) -> Iterator[str]:
    shape = model_shape(total)
    with Ends(*devices, shape, num_buffers=NUM_BUFFERS) as ends:
        plans = {f"{mib} MiB": shape.plan(max_message_bytes=mib << 20) for mib in (128, 32)}
        num_tokens = shape.num_blocks * shape.layout.block_size
        yield from transfer_rows(ends, f"{MODEL}, {num_tokens:,} tokens", plans, rounds)


def nixl_rows(devices: tuple[str, str], rounds: int) -> Iterator[str]:
    """NIXL's rows; a failure of NIXL is reported and costs no other row."""
    try:
        for row in nixl.rows(devices, BLOCKS, BLOCK_BYTES, rounds):
            yield line("NIXL, a write of as many bytes", f"{row.pieces} pieces", 1, row.seconds, row.num_bytes)
    except nixl.NixlFailed as why:
        yield f"<!-- NIXL: {why} -->"
