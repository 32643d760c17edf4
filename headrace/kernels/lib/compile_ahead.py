"""Parallel compilation of all kernels of some work before it runs: one by one they take most of a cold start.

    with compiling_ahead():
        work()      # launches nothing: threads compile its kernels, and have finished when the block is left
    work()          # launches them

Contract  for work on a GPU whose launches, grids and arguments do not depend on what kernels compute: the kernels'
          outputs stay undefined, torch's own operations do run. Applies to this thread (or task) alone: others launch
          as usual. Raises what a kernel's compilation raises. Kernels in Triton's cache are only loaded
Source    `AsyncCompileMode`, `JITFunction.run` and `CompiledKernel.run` of Triton 3.6 to 3.9. Its passes, ptxas and the
          C compiler (a launcher for each signature, up to 3.6 or so) release Python's lock
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
    # Never restored, as other threads may be in here, too: it costs 1 us of a launch's 10.
    KernelInterface.__getitem__ = _compile_or_launch
    launch.forget()
    threads = len(os.sched_getaffinity(0))
    device = driver.active.get_current_device()
    with ThreadPoolExecutor(threads, "compile", driver.active.set_current_device, (device,)) as pool, _Ahead(pool):
        yield


def _compile_or_launch(kernel: Any, grid: Any) -> Any:
    """`kernel[grid]`, which only compiles while `compiling_ahead`, and launches otherwise."""
    if not isinstance(active_mode.get(), _Ahead):
        return _launching(kernel, grid)

    def compile_only(*arguments: Any, **options: Any) -> None:
        kernel.run(*arguments, grid=grid, warmup=True, **options)

    return compile_only


class _Ahead(AsyncCompileMode):
    """Triton's asynchronous compilation; each kernel is also loaded, by the thread that compiled it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self._submitted: list[tuple[Callable[[Any], None], Any]] = []

    def submit(self, key: Any, compile_: Callable[[], Any], keep: Callable[[Any], None], *others: Any) -> Any:
        """Starts a compilation, once for each kernel.

        `keep` stores a kernel where its next launch finds it. The pending one is stored at once: Triton 3.6 would
        submit it again for each launch.
        """
        kernel = super().submit(key, lambda: _loaded(compile_()), keep, *others)
        keep(kernel)
        self._submitted.append((keep, kernel))
        return kernel

    def __exit__(self, *error: Any) -> None:
        every = cdiv(len(self.raw_futures), 10)
        for done, _ in enumerate(as_completed(self.raw_futures), 1):
            if done % every == 0 or done == len(self.raw_futures):
                log.info("compiled %d of %d kernels", done, len(self.raw_futures))
        super().__exit__(*error)
        for keep, kernel in self._submitted:  # Triton itself stores it for the first of its submissions alone
            keep(kernel.result())


def _loaded(kernel: Any) -> Any:
    _ = kernel.run  # builds the launcher and loads the binary
    return kernel
