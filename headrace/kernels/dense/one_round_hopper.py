"""Products of up to 192 rows in one round of programs, warp-specialised for Hopper (Gluon).

    plain    y = x W^T
    gated    y = silu(x G^T) * (x U^T), where W is G above U

Each program takes all rows and an equal share of the columns, so W is read once and no multiprocessor waits for a last
round. One warp, the producer, issues bulk copies (TMA) of the next pieces of x and W; a consumer, a warp group, has 64
rows. The producer fills its ring with pieces of W while the kernel before this one ends (pdl.py).

Shapes    x [M, I], any row stride, M <= MOST_ROWS; weight [O, I]; returns [M, O], gated [M, O / 2]
Contract  I is a multiple of 64 and the width of y one of 8; x's rows and the weight begin at multiples of 16 bytes: the
          copy engine needs that. No earlier kernel on the stream writes the weight. See `fits_one_round`. The reference
          is the library's product, gated with headrace.kernels.dense.swiglu behind
Numerics  sums, SiLU and product in float32, rounded once
Source    CUTLASS, sm90 warp-specialised products
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import (
    LAYOUT,
    SPAN,
    BarrierRing,
    aggregate,
    can_be_copied,
    described,
    launch_registers,
    make_barrier_ring,
    registers,
    reinterpret,
    tma_load,
    tma_store,
    wait_for_warps,
)
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv, next_power_of_2

ROWS = gl.constexpr(64)  # of a consumer
MOST_ROWS = 192
FEWEST_ROWS, FEWEST_GATED_ROWS = 33, 17  # fewer took less time in headrace.kernels.dense.small_linear
MOST_COPIES = 4  # of x, read by all programs, over W
MOST_COLUMNS = 80  # of programs with more than two consumers, not gated: beyond it the library took less time
MOST_MAIN = 64  # columns: a consumer's part of them fits one of its pieces of x
SHARED_BYTES = 226 * 1024  # for the ring
OTHER_REGISTERS = 40  # of a consumer's thread, beside its sums


class Share(NamedTuple):
    """A program's columns of y. Tensors have powers of two: its last columns are a tile of their own."""

    main: int
    side: int  # or 0

    @property
    def columns(self) -> int:
        return self.main + self.side


@aggregate
class OperandRing:
    """A ring of pieces of x and W in shared memory, and how wide they are."""

    x: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, SPAN]
    main_halves: gl.shared_memory_descriptor  # [STAGES * HALVES, MAIN, SPAN]: gated, the gate's and up's
    main: gl.shared_memory_descriptor  # the same memory as [STAGES, HALVES * MAIN, SPAN]
    side_halves: gl.shared_memory_descriptor  # likewise, of the side columns
    side: gl.shared_memory_descriptor
    barriers: BarrierRing
    CONSUMERS: gl.constexpr
    HALVES: gl.constexpr
    MAIN: gl.constexpr
    SIDE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, main_halves, main, side_halves, side, barriers, CONSUMERS, HALVES, MAIN, SIDE):
        self.x = x
        self.main_halves = main_halves
        self.main = main
        self.side_halves = side_halves
        self.side = side
        self.barriers = barriers
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.HALVES = gl.constexpr(HALVES)
        self.MAIN = gl.constexpr(MAIN)
        self.SIDE = gl.constexpr(SIDE)


@gluon.jit
def _make_ring(
    dtype: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, MAIN: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, SPAN], LAYOUT)
    main_halves = gl.allocate_shared_memory(dtype, [STAGES * HALVES, MAIN, SPAN], LAYOUT)
    main = reinterpret(main_halves, [STAGES, HALVES * MAIN, SPAN])
    if SIDE:
        side_halves = gl.allocate_shared_memory(dtype, [STAGES * HALVES, SIDE, SPAN], LAYOUT)
        side = reinterpret(side_halves, [STAGES, HALVES * SIDE, SPAN])
    else:
        side_halves, side = main_halves, main  # not used
    barriers = make_barrier_ring(STAGES, CONSUMERS)
    return OperandRing(x, main_halves, main, side_halves, side, barriers, CONSUMERS, HALVES, MAIN, SIDE)


@gluon.jit
def _produce(ring, x_desc, main_desc, side_desc, width, num_pieces):
    ahead = gl.minimum(num_pieces, ring.barriers.STAGES)
    for piece in range(ahead):
        _copy_weights(ring, main_desc, side_desc, width, piece)
    wait_for_previous()
    for piece in range(num_pieces):
        if piece >= ahead:
            ring.barriers.wait_free(piece)
            _copy_weights(ring, main_desc, side_desc, width, piece)
        slot, full = ring.barriers.slot(piece), ring.barriers.full_barrier(piece)
        for consumer in gl.static_range(ring.CONSUMERS):
            tma_load(x_desc, [consumer * ROWS, piece * SPAN], full, ring.x.index(slot * ring.CONSUMERS + consumer))


@gluon.jit
def _copy_weights(ring, main_desc, side_desc, width, piece):
    """Expects all bytes of a piece, and copies those of W."""
    slot, full = ring.barriers.slot(piece), ring.barriers.full_barrier(piece)
    mbarrier.expect(full, (ring.CONSUMERS * ROWS + ring.HALVES * (ring.MAIN + ring.SIDE)) * SPAN * 2)
    first = gl.program_id(0) * (ring.MAIN + ring.SIDE)
    for half in gl.static_range(ring.HALVES):
        row = first + half * width
        tma_load(main_desc, [row, piece * SPAN], full, ring.main_halves.index(slot * ring.HALVES + half))
        if ring.SIDE:
            at = [row + ring.MAIN, piece * SPAN]
            tma_load(side_desc, at, full, ring.side_halves.index(slot * ring.HALVES + half))


@gluon.jit
def _consume(ring, y_main_desc, y_side_desc, num_pieces, ME: gl.constexpr):
    """Consumer ME: ROWS rows, from row ME * ROWS on."""
    MAIN_SUMS: gl.constexpr = ring.HALVES * ring.MAIN
    SIDE_SUMS: gl.constexpr = ring.HALVES * ring.SIDE if ring.SIDE else 8  # 8: not used
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN_SUMS, 16])
    side_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE_SUMS, 16])
    main = gl.zeros([ROWS, MAIN_SUMS], gl.float32, main_layout)
    side = gl.zeros([ROWS, SIDE_SUMS], gl.float32, side_layout)
    for piece in range(num_pieces):
        slot = ring.barriers.slot(piece)
        ring.barriers.wait_full(piece)
        x = ring.x.index(slot * ring.CONSUMERS + ME)
        main = warpgroup_mma(x, ring.main.index(slot).permute((1, 0)), main, use_acc=piece > 0, is_async=True)
        if ring.SIDE:
            side = warpgroup_mma(x, ring.side.index(slot).permute((1, 0)), side, use_acc=piece > 0, is_async=True)
            main, side = warpgroup_mma_wait(2, [main, side])  # the piece before has been read
        else:
            main = warpgroup_mma_wait(1, [main])
        ring.barriers.release(piece + ring.barriers.STAGES - 1, pred=piece > 0)
    if ring.SIDE:
        main, side = warpgroup_mma_wait(0, [main, side])
    else:
        main = warpgroup_mma_wait(0, [main])

    # All pieces have been read, and those of x in these slots by this consumer alone: they take y.
    column = gl.program_id(0) * (ring.MAIN + ring.SIDE)
    _store(main, ring.x.index(ME), y_main_desc, column, ring.HALVES, ring.MAIN, ME)
    if ring.SIDE:
        _store(side, ring.x.index(ring.CONSUMERS + ME), y_side_desc, column + ring.MAIN, ring.HALVES, ring.SIDE, ME)
    tma.store_wait(0)


@gluon.jit
def _store(sums, piece, y_desc, column, HALVES: gl.constexpr, COLUMNS: gl.constexpr, ME: gl.constexpr):
    """Writes COLUMNS columns of y through the memory of a piece of x; no rows and columns past the last."""
    if HALVES == 2:
        out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        gate, up = sums.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
        y = gl.convert_layout(gate / (1.0 + gl.exp2(gate * -LOG2_E)) * up, out, assert_trivial=True)
    else:
        y = sums
    layout: gl.constexpr = y_desc.layout
    y_tile = reinterpret(piece, [ROWS, COLUMNS], layout)
    y_tile.store(y.to(y_desc.dtype))
    fence_async_shared()
    wait_for_warps()
    tma_store(y_desc, [ME * ROWS, column], y_tile)


@gluon.jit(do_not_specialize=["width", "num_pieces"])
def _one_round_kernel(
    x_desc, main_desc, side_desc, y_main_desc, y_side_desc, width, num_pieces,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, MAIN: gl.constexpr, SIDE: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """width: columns of y. Without side columns their descriptors are those of the main ones."""
    let_next_start()
    ring = _make_ring(x_desc.dtype, CONSUMERS, STAGES, HALVES, MAIN, SIDE)
    fence_async_shared()  # makes the barriers visible to the copy engine
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (ring, y_main_desc, y_side_desc, num_pieces, 0)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (ring, y_main_desc, y_side_desc, num_pieces, 0)),
             (_consume, (ring, y_main_desc, y_side_desc, num_pieces, 1)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [(_consume, (ring, y_main_desc, y_side_desc, num_pieces, 0)),
             (_consume, (ring, y_main_desc, y_side_desc, num_pieces, 1)),
             (_consume, (ring, y_main_desc, y_side_desc, num_pieces, 2)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def one_round_hopper(x: Tensor, weight: Tensor, is_gated: bool, out: Tensor | None = None) -> Tensor:
    """y, written to `out` if given. Raises ValueError unless `fits_one_round`."""
    if not fits_one_round(x, weight, is_gated):
        given = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"{given}: see this file's Contract")
    (M, I), halves = x.shape, 2 if is_gated else 1  # noqa: E741
    width = weight.shape[0] // halves
    share, consumers = share_of(width), cdiv(M, ROWS.value)
    side = share.side or share.main
    y = torch.empty((M, width), dtype=x.dtype, device=x.device) if out is None else out
    consumer_registers, producer_registers = registers(consumers)
    _one_round_kernel[(cdiv(width, share.columns),)](
        described(x, ROWS.value, SPAN.value), described(weight, share.main, SPAN.value),
        described(weight, side, SPAN.value), described(y, ROWS.value, share.main), described(y, ROWS.value, side),
        width, I // SPAN.value,
        CONSUMERS=consumers, STAGES=num_stages(consumers, halves * share.columns), HALVES=halves,
        MAIN=share.main, SIDE=share.side, REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(consumers), **OVERLAPPED,
    )  # fmt: skip
    return y


def share_of(width: int) -> Share:
    """The columns of a program, of as many programs as multiprocessors at most."""
    least = 8 * cdiv(cdiv(width, MULTIPROCESSORS), 8)
    main = 1 << (least.bit_length() - 1)
    side = 0 if least == main else max(8, next_power_of_2(least - main))
    return Share(2 * main, 0) if side == main else Share(main, side)


def num_stages(consumers: int, num_sums: int) -> int:
    """Slots of the ring."""
    return min(8, SHARED_BYTES // ((consumers * ROWS.value + num_sums) * SPAN.value * 2))


def fewest_rows() -> tuple[int, ...]:
    """The fewest rows of each compiled kernel: where more are faster in one round, so are these."""
    return FEWEST_GATED_ROWS, FEWEST_ROWS, ROWS.value + 1, 2 * ROWS.value + 1


def fits_one_round(x: Tensor, weight: Tensor, is_gated: bool) -> bool:
    """True if Hopper variants run here, and the kernel takes such sizes and memory."""
    return runs_hopper(x) and has_one_round(x, weight, is_gated)


def is_faster_in_one_round(x: Tensor, weight: Tensor, is_gated: bool) -> bool:
    """True if it fits, and took less time than small_linear.py and the library's product (docs/gpu-notes.md, 46)."""
    rows, width = len(x), weight.shape[0] // (2 if is_gated else 1)
    return (
        (FEWEST_GATED_ROWS if is_gated else FEWEST_ROWS) <= rows <= MOST_ROWS
        and rows * MULTIPROCESSORS <= MOST_COPIES * len(weight)
        and (is_gated or rows <= 2 * ROWS.value or share_of(width).columns <= MOST_COLUMNS)
        and fits_one_round(x, weight, is_gated)
    )


def has_one_round(x: Tensor, weight: Tensor, is_gated: bool) -> bool:
    """True if the kernel takes such sizes and memory: see Contract."""
    halves = 2 if is_gated else 1
    if not can_be_copied(x, weight) or len(x) > MOST_ROWS or len(weight) % (8 * halves):
        return False
    share, consumers = share_of(len(weight) // halves), cdiv(len(x), ROWS.value)
    num_sums = halves * share.columns
    has_registers = num_sums // 2 + OTHER_REGISTERS <= registers(consumers)[0]
    return share.main <= MOST_MAIN and has_registers and num_stages(consumers, num_sums) >= 2
