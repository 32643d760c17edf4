"""Fast launches of a kernel's compiled forms: a third of the host time of `kernel[grid](...)`, the driver's aside.

    launch(_kernel, programs, (x, y), (count,), (WIDTH, TILE), num_warps=4)
    _kernel[(programs,)](x, y, count, WIDTH, TILE, num_warps=4)                 # does the same

At each launch Triton inspects the type and the alignment of every argument, and writes them into the name under which
it finds the compiled kernel: 10 to 20 us. Here only those that can differ are a key.

Contract  parameters in this order: tensors, numbers, constants (`tl.constexpr`). Whatever a kernel is
          specialised for is in the key or constant: a number is in its `do_not_specialize` and always of 32 bits, or
          the same for all launches with these constants. The first tensor is on the current device, the others there
          or in pinned memory; the stream is the device's current one. Triton's launch hooks (its profiler's) see only
          each form's first launch
Source    `JITFunction.run` and `CompiledKernel.__getitem__` of Triton 3.6 to 3.9
"""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.runtime import driver

ALIGNMENT_BYTES = 16
"""Triton compiles another form for pointers that are not multiples of this."""

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    *,
    num_warps: int,
) -> None:
    device = tensors[0].get_device()
    kinds = tuple([(tensor.dtype, tensor.data_ptr() % ALIGNMENT_BYTES == 0) for tensor in tensors])
    form = (kernel.fn, device, kinds, constants, num_warps)  # a kernel's own hash is of its source
    known = _compiled.get(form)
    if known is None:  # the first launch; in the interpreter, which compiles nothing, each one
        _compiled[form] = kernel[(programs,)](*tensors, *numbers, *constants, num_warps=num_warps)
        return
    stream = driver.active.get_current_stream(device)
    no_hooks = None, None, None
    known.run(programs, 1, 1, stream, known.function, known.packed_metadata, *no_hooks, *tensors, *numbers, *constants)


def forget() -> None:
    """Forgets all forms: the next launch of each goes through Triton, as the first one did."""
    _compiled.clear()
