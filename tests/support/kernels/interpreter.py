"""Triton's interpreter without the work that it repeats at each call of one kernel's functions.

Triton 3.6 replaces the members of its language by interpreted ones when it launches a kernel, and again, with the same
ones, at every call of a `@triton.jit` function by that kernel: two thirds of an attention kernel's time here.
"""

from types import FunctionType
from typing import Any

from triton.runtime import interpreter


def replace_the_language_once_a_launch() -> None:
    """For all kernels that this process interprets from now on."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced_for: set[int] = set()  # in the launch in progress: functions of one module see one language

    def replace_once(function: FunctionType) -> Any:
        module = id(function.__globals__)
        if module in replaced_for:
            return interpreter._LangPatchScope()
        replaced_for.add(module)
        return replace(function)

    def launch_afresh(self: Any, *arguments: Any, **keywords: Any) -> None:
        replaced_for.clear()
        try:
            launch(self, *arguments, **keywords)
        finally:
            replaced_for.clear()  # the language is the compiler's again

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_afresh
