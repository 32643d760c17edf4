"""Triton's interpreter without the work that it repeats: kernels' tests take most of a run's time.

The members of Triton's language are replaced by interpreted ones when a kernel is launched, and again, with the same
ones, at every call of a `@triton.jit` function by that kernel: two thirds of an attention kernel's time here. A
reduction or scan by a function of the kernel's own calls it for each element: two thirds of the delta rule's updates'.
And each number looks its type up in a table that is made for it.
"""

from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

POINTER = np.dtype(np.uint64)


def hasten_the_interpreter() -> None:
    """For all kernels that this process interprets from now on."""
    _replace_the_language_once_a_launch()
    interpreter.ReduceOps.generic_reduce = _reduce_halves
    interpreter.ScanOps.generic_scan = _scan_slices
    # Each addition of 32 bits is made again in 64: at tests' sizes none overflows.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    dtype_of_scalar = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: (
        POINTER if isinstance(kind.scalar, tl.pointer_type) else dtype_of_scalar(kind.scalar)
    )


def _replace_the_language_once_a_launch() -> None:
    replace_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced_for: set[int] = set()  # in the launch in progress: functions of one module see one language

    def replace_once(function: FunctionType) -> Any:
        module = id(function.__globals__)
        if module in replaced_for:
            return interpreter._LangPatchScope()
        replaced_for.add(module)
        return replace_language(function)

    def launch_afresh(self: Any, *arguments: Any, **keywords: Any) -> None:
        replaced_for.clear()
        try:
            launch(self, *arguments, **keywords)
        finally:
            replaced_for.clear()  # the language is the compiler's again

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_afresh


def _reduce_halves(self: interpreter.ReduceOps, input: tuple[Any, ...]) -> list[Any]:
    """Combines neighbours along the axis, all pairs in one call, until one element is left: their order stays."""
    (values, axis), dtypes = self.unravel(input, self.axis), [each.dtype for each in input]
    parts = [each.handle.data for each in values]
    while (length := parts[0].shape[axis]) > 1:
        at = partial(_taken, parts, axis)
        combined = _combined(self, dtypes, at(range(0, length - 1, 2)), at(range(1, length, 2)))
        last = at(range(length - length % 2, length))
        parts = [np.concatenate(both, axis) for both in zip(combined, last, strict=True)]
    if not self.keep_dims:
        parts = [part.squeeze(axis) for part in parts]
    elif self.axis is None:
        parts = [part.reshape((1,) * input[0].handle.data.ndim) for part in parts]
    return [self.to_tensor(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]


def _scan_slices(self: interpreter.ScanOps, input: tuple[Any, ...]) -> list[Any]:
    """Combines whole slices along the axis, one after the other."""
    parts, dtypes = [each.handle.data for each in input], [each.dtype for each in input]
    found = [_taken(parts, self.axis, [0])]
    for place in range(1, parts[0].shape[self.axis]):
        found.append(_combined(self, dtypes, found[-1], _taken(parts, self.axis, [place])))
    whole = [np.concatenate(slices, self.axis) for slices in zip(*found, strict=True)]
    return [self.to_tensor(part, dtype) for part, dtype in zip(whole, dtypes, strict=True)]


def _taken(parts: list[np.ndarray], axis: int, places: Any) -> list[np.ndarray]:
    return [part.take([*places], axis) for part in parts]


def _combined(
    operation: interpreter.ReduceScanOpInterface, dtypes: list[Any], first: list[np.ndarray], second: list[np.ndarray]
) -> list[np.ndarray]:
    """What the kernel's function makes of two slices each."""
    both = [
        operation.to_tensor(part, dtype) for parts in (first, second) for part, dtype in zip(parts, dtypes, strict=True)
    ]
    made = operation.combine_fn.fn(*both)
    return [each.handle.data for each in (made if isinstance(made, tuple) else (made,))]
