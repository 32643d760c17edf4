"""What the kernels by hand for Hopper share: when they run, how memory is laid out and taken in turns, a block's
registers, and the names of Gluon that Triton 3.6 spells otherwise."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.language.core import _aggregate

LEAST_REGISTERS = 32  # of a producer's thread

SPAN = gl.constexpr(64)  # elements of a row that the copy engine lays out together: 128 bytes
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

aggregate = _aggregate  # Triton 3.9 also calls it gluon.aggregate
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(tiles, shape: gl.constexpr):
    """The same shared memory, laid out alike, in another shape."""
    if HAS_REINTERPRET:
        return tiles.reinterpret(tiles.dtype, shape, LAYOUT)
    else:
        return tiles._reinterpret(tiles.dtype, shape, LAYOUT)


@aggregate
class Turns:
    """When a producer and consumers may use places in shared memory: the n-th thing of a program, over all of its work,
    takes place n % STAGES in round n // STAGES. For each place two barriers: `full`, where the copy engine counts the
    bytes that came, and `free`, where consumers say that they have read."""

    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full, free, STAGES):
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def place(self, n):
        return n % self.STAGES

    @gluon.jit
    def filled(self, n):
        """The barrier that counts what is copied to its place."""
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
def make_turns(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Turns(full, free, STAGES)


def launch_registers(consumers: int) -> int:
    """Of each thread when a block of consumers and one producer starts: the multiprocessor's, evenly; the producer's
    warp group counts in full."""
    return 65536 // (128 * (consumers + 1)) // 8 * 8


def registers(consumers: int) -> tuple[int, int]:
    """Of a consumer's thread, and of the producer's: what is left."""
    total = launch_registers(consumers) * (consumers + 1)
    each = min((total - LEAST_REGISTERS) // consumers // 8 * 8, 240)
    return each, total - consumers * each
