"""How quick a piece of host work can be: the best of a few tries, which other work on the machine disturbs least."""

import time
from collections.abc import Callable


def best_s(work: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Seconds of one call: the quickest of `repeats` loops of so many calls."""
    loops = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for _ in range(calls):
            work()
        loops.append((time.perf_counter() - began_s) / calls)
    return min(loops)
