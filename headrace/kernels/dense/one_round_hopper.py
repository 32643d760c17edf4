"""Products of up to 192 rows in one round of programs, warp-specialised for Hopper (Gluon).

    plain    y = x W^T
    gated    y = silu(x G^T) * (x U^T), where W is G above U
    parts    y[s] = x[:, part s] W[:, part s]^T in float32: their sum is the product

Each program takes all rows and an equal share of the columns, in parts of some depth or whole, so W is read once and no
multiprocessor waits for a last round. One warp, the producer, issues bulk copies (TMA) of the next pieces of x and W; a
consumer, a warp group, has 64 rows. The producer fills its ring with pieces of W while the kernel before this one ends
(pdl.py).

Shapes    x [M, I], any row stride, M <= MOST_ROWS; weight [O, I]; returns [M, O], gated [M, O / 2], parts [S, M, O] in
          float32, or [M, O] where it is not worth to part the rows of W (`share_of`)
Contract  I is a multiple of 64 and the width of y one of 8, at most MOST_WIDTH, of gated products of many rows less, by
          the registers; x's rows, the weight and `out` begin at multiples of 16 bytes: the copy engine needs that.
          No earlier kernel on the stream writes the weight. See `fits_one_round`. The reference is
          headrace.kernels.dense.small_linear, or the library's product
Numerics  sums, SiLU and product in float32, rounded once
Source    CUTLASS, sm90 warp-specialised products
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from typing import Literal, NamedTuple, TypeAlias

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

from headrace.kernels.dense.small_linear import checked_out
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
    reinterpret,
    tma_load,
    tma_store,
    wait_for_warps,
)
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv, next_power_of_2

ROWS = gl.constexpr(64)  # of a consumer
MOST_ROWS = 192
ROWS_OF_KERNELS = 16, 32, 33, 65, 129
"""Rows of x that meet each compiled kernel: one for each number of consumers, and of rows in a box of x. If any number
of rows takes one of these kernels, so does its number here."""
MOST_COPIES = 4  # bytes of x that all programs read, each all of it, for each byte of W
MOST_COLUMNS = 80  # of programs with more than two consumers, plain: beyond it the library took less time
MOST_MAIN = 64  # columns: a consumer's part of them fits one of its pieces of x
MOST_WIDTH = 96 * MULTIPROCESSORS  # columns of all programs: 64 and 32 each
LEAST_ROWS, LEAST_IN_PARTS = 2048, 2048 * 2048  # of W; its values: smaller matrices were not measured
SHARED_BYTES = 226 * 1024  # for the ring
OTHER_REGISTERS = 48  # of a consumer's thread, beside its sums
PRODUCER_REGISTERS = 88  # at least


Form: TypeAlias = Literal["plain", "gated", "parts"]


class Share(NamedTuple):
    """A program's columns of y, from 1 / `parts` of each row of W. Tensors have powers of two: its last columns are a
    tile of their own."""

    main: int
    side: int  # or 0
    parts: int = 1

    @property
    def columns(self) -> int:
        return self.main + self.side


class Registers(NamedTuple):
    """Registers of a thread: of a consumer, of the producer, and of all at the launch, shared evenly."""

    consumer: int
    producer: int
    launch: int


@aggregate
class OperandRing:
    """A ring of pieces of x and W in shared memory, and how wide they are."""

    x: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, SPAN]: of each piece X_ROWS rows are copied
    main_halves: gl.shared_memory_descriptor  # [STAGES * HALVES, MAIN, SPAN]: gated, the gate's and up's
    main: gl.shared_memory_descriptor  # the same memory as [STAGES, HALVES * MAIN, SPAN]
    side_halves: gl.shared_memory_descriptor  # likewise, of the side columns
    side: gl.shared_memory_descriptor
    barriers: BarrierRing
    CONSUMERS: gl.constexpr
    HALVES: gl.constexpr
    MAIN: gl.constexpr
    SIDE: gl.constexpr
    PARTS: gl.constexpr
    X_ROWS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, main_halves, main, side_halves, side, barriers, CONSUMERS, HALVES, MAIN, SIDE, PARTS, X_ROWS):
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
        self.PARTS = gl.constexpr(PARTS)
        self.X_ROWS = gl.constexpr(X_ROWS)

    @gluon.jit
    def part(self):
        """This program's part of each row of W."""
        return gl.program_id(0) % self.PARTS

    @gluon.jit
    def first_column(self):
        """This program's first column of y."""
        return gl.program_id(0) // self.PARTS * (self.MAIN + self.SIDE)


@gluon.jit
def _make_ring(
    dtype: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, MAIN: gl.constexpr, SIDE: gl.constexpr, PARTS: gl.constexpr, X_ROWS: gl.constexpr,
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
    return OperandRing(x, main_halves, main, side_halves, side, barriers, CONSUMERS, HALVES, MAIN, SIDE, PARTS, X_ROWS)


@gluon.jit
def _produce(ring, x_desc, main_desc, side_desc, width, num_pieces):
    ahead = gl.minimum(num_pieces, ring.barriers.STAGES)
    for piece in range(ahead):
        _copy_weights(ring, main_desc, side_desc, width, num_pieces, piece)
    wait_for_previous()
    for piece in range(num_pieces):
        if piece >= ahead:
            ring.barriers.wait_free(piece)
            _copy_weights(ring, main_desc, side_desc, width, num_pieces, piece)
        slot, full = ring.barriers.slot(piece), ring.barriers.full_barrier(piece)
        column = (ring.part() * num_pieces + piece) * SPAN
        for consumer in gl.static_range(ring.CONSUMERS):
            x = ring.x.index(slot * ring.CONSUMERS + consumer).slice(0, ring.X_ROWS, 0)
            tma_load(x_desc, [consumer * ROWS, column], full, x)


@gluon.jit
def _copy_weights(ring, main_desc, side_desc, width, num_pieces, piece):
    """Expects all bytes of a piece, and copies those of W."""
    slot, full = ring.barriers.slot(piece), ring.barriers.full_barrier(piece)
    mbarrier.expect(full, (ring.CONSUMERS * ring.X_ROWS + ring.HALVES * (ring.MAIN + ring.SIDE)) * SPAN * 2)
    column = (ring.part() * num_pieces + piece) * SPAN
    for half in gl.static_range(ring.HALVES):
        row = ring.first_column() + half * width
        tma_load(main_desc, [row, column], full, ring.main_halves.index(slot * ring.HALVES + half))
        if ring.SIDE:
            at = [row + ring.MAIN, column]
            tma_load(side_desc, at, full, ring.side_halves.index(slot * ring.HALVES + half))


@gluon.jit
def _consume(ring, y_main, y_side, num_rows, width, num_pieces, ME: gl.constexpr):
    """Consumer ME: ROWS rows, from row ME * ROWS on. Sums of rows that x does not have are not written, whatever lay in
    their memory."""
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

    column = ring.first_column()
    if ring.PARTS > 1:
        _store_part(main, y_main, ring.part(), column, num_rows, width, main_layout, ME)
        if ring.SIDE:
            _store_part(side, y_main, ring.part(), column + ring.MAIN, num_rows, width, side_layout, ME)
    else:  # all pieces have been read, and those of x in these slots by this consumer alone: they take y
        wait_for_warps()  # by all of its warps: each has waited for its own products
        _store(main, ring.x.index(ME), y_main, column, ring.HALVES, ring.MAIN, ME)
        if ring.SIDE:
            _store(side, ring.x.index(ring.CONSUMERS + ME), y_side, column + ring.MAIN, ring.HALVES, ring.SIDE, ME)
        tma.store_wait(0)


@gluon.jit
def _store_part(sums, y_ptr, part, first_column, num_rows, width, layout: gl.constexpr, ME: gl.constexpr):
    """Writes sums to part [num_rows, width] of y, from the registers."""
    row = ME * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    at = (part * num_rows + row)[:, None] * width + column[None, :]
    gl.store(y_ptr + at, sums, mask=(row < num_rows)[:, None] & (column < width)[None, :])


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


@gluon.jit(do_not_specialize=["num_rows", "eighths", "num_pieces"])
def _one_round_kernel(
    x_desc, main_desc, side_desc, y_main, y_side, num_rows, eighths, num_pieces,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, MAIN: gl.constexpr, SIDE: gl.constexpr,
    PARTS: gl.constexpr, X_ROWS: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """eighths: of y's width, so that the compiler knows it to be a multiple of 8 and a thread's columns to lie side by
    side. num_pieces: of a part. y_main: the descriptor of main columns, or y's pointer where it has PARTS. Without side
    columns the arguments for them are those for the main ones."""
    let_next_start()
    width = eighths * 8
    ring = _make_ring(x_desc.dtype, CONSUMERS, STAGES, HALVES, MAIN, SIDE, PARTS, X_ROWS)
    fence_async_shared()  # makes the barriers visible to the copy engine
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 0)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 0)),
             (_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 1)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [(_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 0)),
             (_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 1)),
             (_consume, (ring, y_main, y_side, num_rows, width, num_pieces, 2)),
             (_produce, (ring, x_desc, main_desc, side_desc, width, num_pieces))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def one_round_hopper(x: Tensor, weight: Tensor, form: Form, out: Tensor | None = None) -> Tensor:
    """y, written to `out` if given, where W's rows are whole. Raises ValueError unless `fits_one_round`."""
    if not fits_one_round(x, weight, form):
        given = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, {form}"
        raise ValueError(f"{given}: see this file's Contract")
    (M, I), halves = x.shape, halves_of(form)  # noqa: E741
    width, consumers, x_rows = weight.shape[0] // halves, cdiv(M, ROWS.value), x_rows_of(M)
    share = share_of(width, I, form)
    side = share.side or share.main
    if share.parts > 1:
        if out is not None:
            raise ValueError(f"out {tuple(out.shape)}: {share.parts} parts of y have no place in it")
        y = torch.empty((share.parts, M, width), dtype=torch.float32, device=x.device)
        y_main, y_side = y, y
    else:
        y = torch.empty((M, width), dtype=x.dtype, device=x.device)
        if out is not None:
            y = checked_out(out, (M, width), x.dtype)
        y_main, y_side = described(y, ROWS.value, share.main), described(y, ROWS.value, side)
    registers = registers_for(consumers, halves * share.columns)
    _one_round_kernel[(cdiv(width, share.columns) * share.parts,)](
        described(x, x_rows, SPAN.value), described(weight, share.main, SPAN.value),
        described(weight, side, SPAN.value), y_main, y_side, M, width // 8, I // SPAN.value // share.parts,
        CONSUMERS=consumers, STAGES=num_stages(consumers, halves * share.columns), HALVES=halves,
        MAIN=share.main, SIDE=share.side, PARTS=share.parts, X_ROWS=x_rows, REGISTERS=registers.consumer,
        PRODUCER_REGISTERS=registers.producer, num_warps=4, maxnreg=registers.launch, **OVERLAPPED,
    )  # fmt: skip
    return y


def halves_of(form: Form) -> int:
    """Rows of W for each column of y."""
    return 2 if form == "gated" else 1


def x_rows_of(M: int) -> int:
    """Rows of x that the copy engine takes at once: those past the last cost it more than others do."""
    return min(ROWS.value, max(16, next_power_of_2(M)))


def share_of(width: int, num_in: int, form: Form) -> Share:
    """The columns of a program, of as many programs as multiprocessors at most; parts of whole pieces of W."""
    most = (4, 2, 1) if form == "parts" else (1,)
    parts = next((each for each in most if num_in // SPAN.value % each == 0 and width * each <= MOST_WIDTH), 1)
    least = 8 * cdiv(cdiv(width, MULTIPROCESSORS // parts), 8)
    main = 1 << (least.bit_length() - 1)
    side = 0 if least == main else max(8, next_power_of_2(least - main))
    return Share(2 * main, 0, parts) if side == main else Share(main, side, parts)


def num_stages(consumers: int, num_sums: int) -> int:
    """Slots of the ring."""
    return min(8, SHARED_BYTES // ((consumers * ROWS.value + num_sums) * SPAN.value * 2))


def registers_for(consumers: int, num_sums: int) -> Registers:
    """No more than are needed: what is left lets the programs of the next kernel begin beside this one's."""
    consumer = 8 * cdiv(num_sums // 2 + OTHER_REGISTERS, 8)
    launch = 8 * cdiv(cdiv(consumers * consumer + PRODUCER_REGISTERS, consumers + 1), 8)
    return Registers(consumer, (consumers + 1) * launch - consumers * consumer, launch)


def fits_one_round(x: Tensor, weight: Tensor, form: Form) -> bool:
    """True if Hopper variants run here, and the kernel takes such sizes and memory."""
    return runs_hopper(x) and has_one_round(x, weight, form)


def is_faster_in_one_round(x: Tensor, weight: Tensor, form: Form) -> bool:
    """True if it fits, and took less time than small_linear.py and the library's product (docs/gpu-notes.md, 46)."""
    rows, width = len(x), weight.shape[0] // halves_of(form)
    if rows > MOST_ROWS:
        return False  # prompts launch kernel by kernel: the host has no time for the rest
    share, has_many = share_of(width, x.shape[1], form), rows > 2 * ROWS.value
    if form == "parts":
        is_faster = weight.numel() >= LEAST_IN_PARTS and not (has_many and share.side)  # x is read for each tile
    else:
        is_faster = len(weight) >= max(LEAST_ROWS, rows * MULTIPROCESSORS / MOST_COPIES)
        is_faster = is_faster and (form == "gated" or not has_many or share.columns <= MOST_COLUMNS)
    return is_faster and fits_one_round(x, weight, form)


def has_one_round(x: Tensor, weight: Tensor, form: Form) -> bool:
    """True if the kernel takes such sizes and memory: see Contract."""
    halves = halves_of(form)
    if not can_be_copied(x, weight) or len(x) > MOST_ROWS or len(weight) % (8 * halves):
        return False
    share, consumers = share_of(len(weight) // halves, x.shape[1], form), cdiv(len(x), ROWS.value)
    num_sums = halves * share.columns
    has_registers = registers_for(consumers, num_sums).launch <= launch_registers(consumers)
    return share.main <= MOST_MAIN and has_registers and num_stages(consumers, num_sums) >= 2
