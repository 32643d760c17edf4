"""Fast launches distinguish a kernel's compiled forms as Triton does, and on a GPU relaunch them without it."""

from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.lib import launch as launching
from headrace.kernels.lib.launch import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit(do_not_specialize=["count"])
def _add_kernel(x_ptr, y_ptr, count, AMOUNT: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count) + AMOUNT, mask=at < count)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_launch_is_right_each_time_whatever_was_launched_before(dtype):
    for count, begin, amount in ((40, 0, 1), (40, 0, 1), (1, 0, 1), (40, 1, 1), (40, 0, 2), (37, 0, 2), (16, 1, 1)):
        x = torch.arange(100, device=DEVICE).to(dtype)[begin : begin + count]
        y = torch.full((100,), -1, device=DEVICE, dtype=dtype)
        launch(_add_kernel, 3, (x, y[begin:]), (count,), (amount, 16), num_warps=1)
        assert torch.equal(y[begin : begin + count], x + amount)
        assert (y[:begin] == -1).all() and (y[begin + count :] == -1).all()


class Compiled:
    """Stands in for a compiled kernel."""

    function, packed_metadata = 7, (1, 2)

    def __init__(self):
        self.run = Mock()


class Kernel:
    """Stands in for a kernel."""

    def __init__(self, compiled):
        self.fn = self
        self.compiled = compiled
        self.calls = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return self.compiled

        return run


@pytest.fixture
def driver(monkeypatch) -> Mock:
    """Stands in for the driver, which needs a GPU: its current stream is 11."""
    driver = Mock(**{"active.get_current_stream.return_value": 11})
    monkeypatch.setattr(launching, "driver", driver)
    return driver


def test_a_form_is_compiled_once_and_then_launched_with_what_changes(driver: Mock):
    compiled = Compiled()
    kernel = Kernel(compiled)
    x, y = torch.zeros(64), torch.zeros(64)
    for programs, count in ((3, 40), (5, 70)):
        launch(kernel, programs, (x, y), (count,), (1, 16), num_warps=1)
    [(grid, arguments, options)] = kernel.calls
    assert (grid, arguments[2:], options) == ((3,), (40, 1, 16), {"num_warps": 1})
    [(arguments, options)] = compiled.run.call_args_list
    assert (arguments[:6], arguments[6:9], options) == ((5, 1, 1, 11, 7, (1, 2)), (None, None, None), {})
    assert arguments[9] is x and arguments[10] is y and arguments[11:] == (70, 1, 16)
    driver.active.get_current_stream.assert_called_once_with(x.get_device())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: streams")
def test_a_known_form_goes_to_the_current_stream():
    x, y, stream = torch.zeros(16, device=DEVICE), torch.zeros(16, device=DEVICE), torch.cuda.Stream()
    launch(_add_kernel, 1, (x, y), (16,), (1, 16), num_warps=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
        launch(_add_kernel, 1, (x, y), (16,), (1, 16), num_warps=1)
    torch.cuda.synchronize()
    assert (y == 6).all()


@pytest.mark.parametrize(
    ("tensors", "constants", "num_warps"),
    [
        (lambda x: (x[1:], x), (1, 16), 1),
        (lambda x: (x, x[1:]), (1, 16), 1),
        (lambda x: (x.view(torch.int32), x), (1, 16), 1),
        (lambda x: (x, x), (2, 16), 1),
        (lambda x: (x, x), (1, 16), 2),
    ],
)
def test_whatever_triton_compiles_anew_for_is_another_form(tensors, constants, num_warps):
    kernel, x = Kernel(Compiled()), torch.zeros(64)
    launch(kernel, 1, (x, x), (), (1, 16), num_warps=1)
    launch(kernel, 1, tensors(x), (), constants, num_warps=num_warps)
    assert len(kernel.calls) == 2


def test_the_interpreter_has_nothing_to_keep():
    kernel, x = Kernel(None), torch.zeros(64)
    for _ in range(2):
        launch(kernel, 1, (x,), (), (1,), num_warps=1)
    assert len(kernel.calls) == 2
