"""Compiling all kernels of some work at once, before it runs: one after the other they take most of a first start.

    with compiling_ahead():
        work()      # launches nothing: its kernels are compiled in threads, and are there when the block is left
    work()          # launches them

Contract  for work on a GPU whose launches, grids and arguments do not depend on what kernels compute; what they would
          have written holds anything, and whatever torch itself runs, runs. In this thread (or task) alone: others
          launch as ever. Raises what a kernel's compilation raises. On files that Triton has cached it takes no longer
          than loading them
Source    `AsyncCompileMode`, `JITFunction.run` and `CompiledKernel.run` of Triton 3.6 to 3.9. Its passes, ptxas and the
          C compiler (a launcher for each signature, up to 3.6 or so) run without Python's lock
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import KernelInterface

from headrace.kernels.lib import launch
from headrace.kernels.lib.sizes import cdiv

log = logging.getLogger(__name__)

_launching = KernelInterface.__getitem__


@contextmanager
def compiling_ahead() -> Iterator[None]:
    # For good, as other threads may be in here, too: it costs a launch of 10 us a tenth of one.
    KernelInterface.__getitem__ = _asking
    launch.forget()
    threads = len(os.sched_getaffinity(0))
    device = driver.active.get_current_device()
    with ThreadPoolExecutor(threads, "compile", driver.active.set_current_device, (device,)) as pool, _Ahead(pool):
        yield


def _asking(kernel: Any, grid: Any) -> Any:
    """`kernel[grid]`, which asks for the compilation alone where that is what is wanted."""
    if not isinstance(active_mode.get(), _Ahead):
        return _launching(kernel, grid)

    def ask(*arguments: Any, **options: Any) -> None:
        kernel.run(*arguments, grid=grid, warmup=True, **options)

    return ask


class _Ahead(AsyncCompileMode):
    """Kernels are loaded, too, by the thread that compiled them."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self._asked: list[tuple[Callable[[Any], None], Any]] = []

    def submit(self, key: Any, compile_: Callable[[], Any], keep: Callable[[Any], None], *others: Any) -> Any:
        """`keep` stores a kernel where its next launch looks: until it is there, that it has been asked for, as Triton
        3.6 would ask again for each launch."""
        kernel = super().submit(key, lambda: _loaded(compile_()), keep, *others)
        keep(kernel)
        self._asked.append((keep, kernel))
        return kernel

    def __exit__(self, *error: Any) -> None:
        every = cdiv(len(self.raw_futures), 10)
        for done, _ in enumerate(as_completed(self.raw_futures), 1):
            if done % every == 0 or done == len(self.raw_futures):
                log.info("compiled %d of %d kernels", done, len(self.raw_futures))
        super().__exit__(*error)
        for keep, kernel in self._asked:  # Triton itself keeps it for the first of those that share it
            keep(kernel.result())


def _loaded(kernel: Any) -> Any:
    _ = kernel.run  # makes the launcher and loads the binary
    return kernel
