"""Decode updates over tails of inputs on one GPU (headrace/kernels/lib/tails.py), which seldom write states.

    python3 -m benchmarks kernels-tails [--only gdn ...]

Times of one layer, for one row a sequence, and for four: a token and three drafts. Sequences stand at different tokens
of their blocks, so a time is the mean over a block. The floor counts the state at the base, the ring's entries, inputs
and outputs, and a written state for each block that ends.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Annotated

import torch
import typer

from benchmarks.kernels.state import BATCHES, BF16, CONV_WIDTHS, FP32, Run, random, state_layer
from benchmarks.timing import HEADER, Row, measure
from headrace.kernels.conv.tail_update import causal_conv1d_tail_update
from headrace.kernels.gdn import tail_update as gdn
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.lib.tails import Tails
from headrace.kernels.ssd import tail_update as ssd
from headrace.kernels.ssd.heads import SsdHeads

INTERVAL = 16
ROWS_EACH = (1, 4)


def tails_at(phase: int, batch: int, rows_each: int) -> Tails:
    """Sequence i is `phase + i` tokens into a block, modulo the block; states to write have slots of `batch` and up."""
    kept = (torch.arange(batch) + phase) % INTERVAL
    fills = kept + rows_each >= INTERVAL
    source, target, row = torch.randperm(batch), batch + torch.randperm(batch), torch.randperm(batch)
    start = torch.randint(2, (batch,)) * INTERVAL
    fields = source, torch.where(fills, target, -1), row, start, kept, fills * INTERVAL
    return Tails(torch.stack(fields, dim=1).int().cuda(), rows_each)


def updates(
    name: str,
    model: str,
    step: Callable[[torch.dtype, Tails], Run],
    dtype: torch.dtype,
    *,
    state: int,
    entry: float,
    row: float,
) -> Iterator[Row]:
    """Rows, by a state's elements, and the bytes of an entry of the ring, and of a row's inputs and outputs."""

    def prepare(batch: int, rows_each: int, phases: Iterator[int]) -> Run:
        return step(dtype, tails_at(next(phases), batch, rows_each))  # each copy of the inputs has other phases

    for rows_each in ROWS_EACH:
        for batch in BATCHES:
            states = state * dtype.itemsize * (1 + rows_each / INTERVAL)
            entries = entry * ((INTERVAL - 1) / 2 + rows_each)
            shape = f"{model}, {batch} states in {str(dtype)[6:]}, {rows_each} rows each"
            prepared = partial(prepare, batch, rows_each, count())
            yield measure(name, shape, prepared, batch * (states + entries + row * rows_each))


def ssd_updates() -> Iterator[Row]:
    H, P, N = 64, 64, 128

    def step(dtype: torch.dtype, tails: Tails) -> Run:
        batch, rows = len(tails.fields), len(tails.fields) * tails.rows_each
        x, B, C = random(rows, H * P + 2 * N).split((H * P, N, N), dim=-1)
        D, bias = torch.randn(2, H, device="cuda")
        heads = SsdHeads(-torch.rand(H, device="cuda"), D, bias)
        inputs = x.view(rows, H, P), random(rows, 8512)[:, -H:], B.view(rows, 1, N), C.view(rows, 1, N), heads
        ring = batch, 2 * INTERVAL
        tail = ssd.SsdTail(random(*ring, H, P), random(*ring, 1, N), torch.rand(*ring, H, device="cuda"))
        return partial(ssd.ssd_tail_update, *inputs, state_layer(2 * batch, H, P, N, dtype=dtype), tail, tails)

    sizes = {"state": H * P * N, "entry": 2 * H * P + 2 * N + 4 * H, "row": 4 * H * P + 4 * N + 2 * H}
    for dtype in (FP32, BF16):
        yield from updates("ssd_tail_update", "granite-h-micro", step, dtype, **sizes)


def gdn_updates() -> Iterator[Row]:
    Hk, Hv, D = 16, 32, 128

    def step(dtype: torch.dtype, tails: Tails) -> Run:
        batch, rows = len(tails.fields), len(tails.fields) * tails.rows_each
        q, k, v = random(rows, 2 * Hk + Hv, D).split((Hk, Hk, Hv), dim=1)
        b, a = random(rows, 12352)[:, -2 * Hv :].split(Hv, dim=-1)
        heads = GdnHeads(-torch.rand(Hv, device="cuda"), torch.randn(Hv, device="cuda"))
        ring = batch, 2 * INTERVAL
        tail = gdn.GdnTail(random(*ring, Hk, D), random(*ring, Hv, D), -torch.rand(*ring, Hv, device="cuda"))
        pool = state_layer(2 * batch, Hv, D, D, dtype=dtype)
        return partial(gdn.gdn_tail_update, q, k, v, a, b, heads, pool, tail, tails)

    sizes = {"state": Hv * D * D, "entry": 2 * (Hk + Hv) * D + 4 * Hv, "row": 4 * (Hk + Hv) * D + 4 * Hv}
    for dtype in (FP32, BF16):
        yield from updates("gdn_tail_update", "qwen35-4b", step, dtype, **sizes)


def conv_updates() -> Iterator[Row]:
    def step(channels: int, width: int, has_bias: bool, dtype: torch.dtype, tails: Tails) -> Run:
        batch = len(tails.fields)
        u = random(batch * tails.rows_each, width)[:, width - channels - 64 : width - 64]
        weight, bias = random(channels, 4), random(channels) if has_bias else None
        pool, tail = state_layer(2 * batch, channels, 3, dtype=dtype), random(batch, 2 * INTERVAL, channels)
        return partial(causal_conv1d_tail_update, u, weight, bias, pool, tail, tails)

    for model, widths in CONV_WIDTHS.items():
        # A step reads three inputs before its own, from the state or from the ring, and adds its own to the ring.
        sizes = {"state": 3 * widths[0], "entry": 0, "row": 6 * widths[0]}
        yield from updates("causal_conv1d_tail_update", model, partial(step, *widths), BF16, **sizes)


KINDS: Mapping[str, Callable[[], Iterator[Row]]] = {"ssd": ssd_updates, "gdn": gdn_updates, "conv": conv_updates}


@torch.no_grad()
def main(
    only: Annotated[list[str], typer.Option(help=f"any of {', '.join(KINDS)}")] = [*KINDS],  # noqa: B006
) -> None:
    """Decode updates over tails: Mamba2 (SSD), the gated delta rule, their convolutions."""
    print(HEADER)
    for kind in only:
        for row in KINDS[kind]():
            print(row, flush=True)
