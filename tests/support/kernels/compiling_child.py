"""Compiles kernels ahead, then launches them, on a fake GPU; prints compilations and launches as JSON.

A process of its own: Triton's interpreter, which tests switch on, has no compiler, and a driver cannot be replaced.
"""

import json
import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from headrace.kernels.lib.compile_ahead import compiling_ahead
from headrace.kernels.lib.launch import launch


@triton.jit(do_not_specialize=["count"])
def _add_kernel(x_ptr, count, AMOUNT: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < count) + AMOUNT, mask=at < count)


@triton.jit
def _broken_kernel(x_ptr):
    tl.store(x_ptr, tl.no_such_thing())


class Driver:
    """A fake GPU's driver, with the parts that launches use."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, ...]] = []  # each launch's arguments after its pointer
        self.loaders: list[str] = []  # threads that loaded a binary
        self.utils = SimpleNamespace(
            load_binary=self._load,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launches.append(arguments[-3:])

    def _load(self, *binary: Any) -> tuple[int, ...]:
        self.loaders.append(threading.current_thread().name.split("_")[0])
        return 1, 1, 32, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    gpu, compiled = Driver(), []
    driver.set_active(gpu)
    knobs.compilation.listener = lambda **compilation: compiled.append(compilation["cache_hit"])
    x = torch.zeros(64)

    def work() -> None:
        for count in (40, 50):
            _add_kernel[(1,)](x, count, 1, 16)
            _add_kernel[(1,)](x, count, 2, 16)
            launch(_add_kernel, 1, (x,), (count,), (3, 16), num_warps=1)
            launch(_add_kernel, 1, (x[1:],), (count,), (3, 16), num_warps=1)

    launch(_add_kernel, 1, (x,), (30,), (3, 16), num_warps=1)  # compiled before
    before, progress = (len(gpu.launches), len(compiled)), _LogLines()
    logging.getLogger("headrace.kernels.lib.compile_ahead").addHandler(progress)
    logging.getLogger("headrace.kernels.lib.compile_ahead").setLevel(logging.INFO)
    elsewhere = threading.Thread(target=lambda: _add_kernel[(1,)](x, 20, 9, 16))
    with compiling_ahead():
        work()
        elsewhere.start()
        elsewhere.join()
    asked = {"launches": gpu.launches[before[0] :], "compiled": compiled[before[1] :], "loaders": gpu.loaders[1:]}
    del gpu.launches[:], compiled[:], gpu.loaders[:]
    work()
    real = {"launches": gpu.launches, "compiled": compiled, "loaders": gpu.loaders}
    error = None
    try:
        with compiling_ahead():
            _broken_kernel[(1,)](x)
    except Exception as raised:
        error = str(raised)
    json.dump({"asked": asked, "real": real, "error": error, "progress": progress.lines}, sys.stdout)


if __name__ == "__main__":
    main()
