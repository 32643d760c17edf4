"""Parts of the warp-specialised Hopper kernels (Gluon): tiles for the copy engine, mbarrier pipeline, registers.

Some of Gluon's names differ between Triton 3.6 and 3.9: they are bound here once.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

LEAST_REGISTERS = 32  # a thread of the producer
MOST_REGISTERS = 240  # a thread

SPAN = gl.constexpr(64)  # elements of a row in one swizzle of the copy engine: 128 bytes
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

aggregate = _aggregate  # gluon.aggregate in Triton 3.9
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(tiles, shape: gl.constexpr, layout: gl.constexpr = None):
    """The same shared memory as another shape, in the same layout or another one."""
    new_layout: gl.constexpr = tiles.layout if layout is None else layout
    if HAS_REINTERPRET:
        return tiles.reinterpret(tiles.dtype, shape, new_layout)
    else:
        return tiles._reinterpret(tiles.dtype, shape, new_layout)


@aggregate
class BarrierRing:
    """mbarriers of a ring of STAGES slots in shared memory, between a producer and its consumers.

    Item n of a program, counted over all of its work, uses slot n % STAGES; its barriers' phase is n // STAGES. A slot
    has two barriers: on `full` the copy engine counts the bytes that have arrived, on `free` consumers arrive when they
    have read them.
    """

    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full, free, STAGES):
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def slot(self, n):
        return n % self.STAGES

    @gluon.jit
    def full_barrier(self, n):
        """The barrier on which copies to item n's slot are counted."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def wait_full(self, n, pred=True):
        mbarrier.wait(self.full.index(n % self.STAGES), n // self.STAGES & 1, pred)

    @gluon.jit
    def wait_free(self, n):
        mbarrier.wait(self.free.index(n % self.STAGES), (n // self.STAGES + 1) & 1)

    @gluon.jit
    def release(self, n, pred=True):
        mbarrier.arrive(self.free.index(n % self.STAGES), count=1, pred=pred)


@gluon.jit
def make_barrier_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """ARRIVALS: the producer's on a slot's `full`, beside the bytes counted there."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return BarrierRing(full, free, STAGES)


def launch_registers(consumers: int) -> int:
    """Registers a thread at the launch of a block of consumers and one producer: the multiprocessor's, shared evenly
    by warp groups; the producer's counts as a whole one."""
    return min(65536 // (128 * (consumers + 1)) // 8 * 8, MOST_REGISTERS)


def registers(consumers: int) -> tuple[int, int]:
    """Registers of a consumer's thread, and of the producer's, which keeps the rest."""
    total = launch_registers(consumers) * (consumers + 1)
    each = min((total - LEAST_REGISTERS) // consumers // 8 * 8, MOST_REGISTERS)
    return each, total - consumers * each


def tile_layout(columns: int, bits: int = 16) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory: the widest swizzle that its rows fill, of 32 bytes at least, or none."""
    row_bytes = columns * bits // 8
    return gl.NVMMASharedLayout(min(row_bytes, 128) if row_bytes >= 32 else 0, bits, 2)


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a matrix, for the copy engine."""
    layout = tile_layout(columns, 8 * matrix.element_size())
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


def can_be_copied(x: Tensor, weight: Tensor) -> bool:
    """True if the copy engine takes the operands x [M, I] and weight [O, I] of a product in 16 bits, in whole pieces of
    SPAN columns."""
    return (
        x.dtype == weight.dtype
        and x.shape[1] == weight.shape[1]
        and x.numel() > 0
        and weight.numel() > 0
        and x.shape[1] % SPAN.value == 0
        and weight.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )
