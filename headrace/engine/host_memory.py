"""Allocator settings of a CPU engine: it keeps the memory of its temporaries, as a GPU's caching allocator does.

By default glibc gives larger freed memory back to the kernel and takes it anew, page by page: at 2,048 tokens of the
tiny Granite up to 60,000 page faults, a third of the prefill's time. Whether that happens depends on the other contents
of a process's heaps, so that one node in a few was slow until it was restarted.
"""

import ctypes

# Options of malloc.h with their values. Setting the first or the second also stops glibc from adapting both.
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 2**31 - 1  # free at the heap's end before that goes back; an int is all there is
M_MMAP_THRESHOLD, LARGEST_IN_HEAP = -3, 32 << 20  # more is refused; what is larger also takes long to compute
M_ARENA_MAX, ONE = -8, 1  # a thread's own arena is of heaps of 64 MiB, whose ends are of no use to large temporaries


def keep_freed_memory() -> bool:
    """Applies to the whole process and to threads started from now on: call it before there are others.

    False, and no change, if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP), (M_ARENA_MAX, ONE))
    return all(mallopt(name, value) for name, value in settings)
