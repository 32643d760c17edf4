"""Compiles Triton kernels for an H200 (sm_90), on machines without a GPU, too, and reports what they use.

    [report] = compile_for_h200([Launch("headrace.kernels.x:_x_kernel", {"x_ptr": "*bf16:16"}, {"BLOCK": 64})])
    assert report.stack_bytes == 0

The compiler and ptxas are in Triton's wheel. One child process compiles for all tests of this process: here Triton's
interpreter may be switched on, which replaces the compiler when a kernel is imported.
"""

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headrace.kernels.lib.sizes import cdiv
from tests.support.kernels.sass import reads_of_nothing, sums_of_one_half

COMPILE_TIMEOUT_S = 360  # dozens of kernels, nothing cached, on a shared machine
SHARED_BYTES_A_BLOCK = 227 * 1024
REGISTERS_A_MULTIPROCESSOR = 64 * 1024


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel."""

    kernel: str  # "module:name"
    types: dict[str, str]  # of runtime arguments: "*bf16", "i64"; ":16" after it says divisible by 16
    constexprs: dict[str, Any]  # None, numbers, strings; a None pointer is one of these
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None  # the most a thread may take


@dataclass(frozen=True)
class Compiled:
    registers: int  # a thread
    stack_bytes: int  # a thread: what is spilled, and arrays that are indexed at run time
    shared_bytes: int  # a block
    resident_warps: int  # a multiprocessor, as far as registers, shared memory and its limit of 64 allow
    ptx: str = field(repr=False)

    def accesses(self, instruction: str) -> list[str]:
        """Widths of a PTX instruction, most frequent first: `accesses("ld.global")` -> ["v4.b32", "b16"]."""
        found = re.findall(rf"\b{re.escape(instruction)}((?:\.[\w:]+)+)", self.ptx)
        widths = [re.search(r"(v\d\.)?[bufs]\d+$", form) for form in found]
        names = [match.group() for match in widths if match]
        return sorted(set(names), key=lambda name: -names.count(name))


def compile_for_h200(launches: Sequence[Launch]) -> list[Compiled]:
    """One report a launch. Raises AssertionError with the compiler's message when a kernel does not compile, or when
    its machine code has lost a descriptor's address (sass.py)."""
    asked = {repr(launch): launch for launch in launches}
    made = dict(zip(asked, _compiler().map(_report, asked.values(), timeout=COMPILE_TIMEOUT_S), strict=True))
    return [_compiled(made[repr(launch)]) for launch in launches]


def _compiled(report: Compiled | str) -> Compiled:
    assert isinstance(report, Compiled), report
    return report


@cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_compile_for_real)


def _compile_for_real() -> None:
    """Switches the interpreter off in the new process, before anything imports a kernel."""
    os.environ.pop("TRITON_INTERPRET", None)


def _report(launch: Launch) -> Compiled | str:
    """The report, or the error as text: not every error of the compiler can be sent to another process."""
    try:
        return _compile(launch)
    except Exception:
        return traceback.format_exc()


def _compile(launch: Launch) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    module, name = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    unknown = {*launch.types, *launch.constexprs} ^ set(kernel.arg_names)
    if unknown:
        raise TypeError(f"{launch.kernel}: {sorted(unknown)} missing, or no arguments of the kernel")
    signature, attributes = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        type_name, _, divisor = launch.types.get(argument, "constexpr").partition(":")
        signature[argument] = type_name
        if divisor:
            attributes[(place,)] = [["tt.divisibility", int(divisor)]]
    source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_of(kernel, signature, constexprs=launch.constexprs, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "maxnreg": launch.registers}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = _resource_usage(binary.asm["cubin"])
    wrong = lost_addresses(binary.asm["cubin"])
    assert not wrong, f"{launch}: ptxas has lost the address of a descriptor: {wrong}"
    return Compiled(
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=binary.metadata.shared,
        resident_warps=_resident_warps(usage["REG"], binary.metadata.shared, launch.num_warps),
        ptx=binary.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and the like of a binary, from cuobjdump."""
    dump = _binary_tool(cubin, "cuobjdump", "--dump-resource-usage")
    [line] = [line for line in dump.splitlines() if "REG:" in line]
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}


def lost_addresses(cubin: bytes) -> list[str]:
    """Instructions of a binary that read a lost address (sass.py)."""
    listing = _binary_tool(cubin, "nvdisasm", "-c")
    return [*reads_of_nothing(listing), *sums_of_one_half(listing)]


def _binary_tool(cubin: bytes, name: str, option: str) -> str:
    """Output of one of the CUDA tools in Triton's wheel about a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _resident_warps(registers: int, shared_bytes: int, num_warps: int) -> int:
    a_warp = cdiv(registers * 32, 256) * 256  # registers are handed out to warps in steps of 256
    blocks = min(64 // num_warps, 32, REGISTERS_A_MULTIPROCESSOR // (a_warp * num_warps))
    if shared_bytes:
        blocks = min(blocks, 228 * 1024 // (shared_bytes + 1024))
    return blocks * num_warps
