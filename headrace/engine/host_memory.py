"""Memory that a CPU engine keeps: that of its temporaries, as a GPU's caching allocator does, and few of its programs.

By default glibc gives larger freed memory back to the kernel and takes it anew, page by page: at 2,048 tokens of the
tiny Granite up to 60,000 page faults, a third of the prefill's time. Whether that happens depends on the other contents
of a process's heaps, so that one node in a few was slow until it was restarted.

oneDNN makes a program for each product of two sizes (headrace/kernels/dense/linear.py) and keeps the last 1,024 of
them, twice over, at 0.4 MiB each: steps of ever other numbers of tokens took a node 400 MiB in 600 prompts.
"""

import ctypes
import os

# Options of malloc.h with their values. Setting the first or the second also stops glibc from adapting both.
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 2**31 - 1  # free at the heap's end before that goes back; an int is all there is
M_MMAP_THRESHOLD, LARGEST_IN_HEAP = -3, 32 << 20  # more is refused; what is larger also takes long to compute
M_ARENA_MAX, ONE = -8, 1  # a thread's own arena is of heaps of 64 MiB, whose ends are of no use to large temporaries

NUM_PROGRAMS = 128
"""Programs of 18 sizes of steps, at seven products each: 50 MiB. Decode steps change their size by little at a time,
and prompts that are new to the cache cost the same processor time with 16 programs as with 1,024."""


def keep_few_programs() -> None:
    """Bounds both caches of oneDNN's programs, where the environment says nothing: call it before the first product."""
    for cache in (
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "LRU_CACHE_CAPACITY",
    ):  # oneDNN's own; that of torch's bridge to it
        os.environ.setdefault(cache, str(NUM_PROGRAMS))


def keep_freed_memory() -> bool:
    """Applies to the whole process and to threads started from now on: call it before there are others.

    False, and no change, if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP), (M_ARENA_MAX, ONE))
    return all(mallopt(name, value) for name, value in settings)
