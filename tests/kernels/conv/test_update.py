"""Steps of the causal convolution, in torch and in Triton, against token-by-token float64."""

import pytest
import torch

from headrace.kernels.conv.update import causal_conv1d_update, causal_conv1d_update_triton, launch_shape
from headrace.kernels.lib.segments import StateSource
from tests.kernels.conv.windows import (
    CONV_TYPES,
    DEVICE,
    UPDATE,
    C,
    assert_only_changed,
    implementations,
    parameters,
    poisoned_windows,
    slice_of_a_projection,
)
from tests.kernels.naive import naive_conv
from tests.kernels.recurrences import Case, UpdateTests
from tests.support.kernels.compiled import Launch, compile_for_h200

CASES = [Case("conv", (10, 3), 1e-5), Case("conv_bias", (10, 3), 1e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""


@implementations
@pytest.mark.parametrize("src, dst", [([4], [4]), ([None], [21]), ([7, None, 2, 9, None], [7, 20, 19, 3, 0])], ids=str)
@pytest.mark.parametrize(
    "taps, window, has_bias, silu", [(4, 3, True, True), (3, 2, False, True), (4, 6, False, True), (3, 2, False, False)]
)
def test_a_step_equals_the_convolution(name: str, src, dst, taps: int, window: int, has_bias: bool, silu: bool):
    pool = poisoned_windows(window, [slot for slot in src if slot is not None])
    before, u = pool.clone(), slice_of_a_projection(len(src))
    weight, bias = parameters(taps, has_bias)

    y = UPDATE[name](u, weight, bias, pool, StateSource.of(src, DEVICE), torch.tensor(dst, device=DEVICE), silu)

    for i, slot in enumerate(src):
        start = torch.zeros(C, taps - 1, device=DEVICE) if slot is None else before[slot, :, : taps - 1]
        expected, windows = naive_conv(u[i : i + 1], weight, bias, start, silu)
        torch.testing.assert_close(y[i : i + 1].double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(pool[dst[i], :, : taps - 1].double(), windows[0])
        assert torch.equal(pool[dst[i], :, taps - 1 :].isnan(), before[dst[i], :, taps - 1 :].isnan())
    assert_only_changed(before, pool, dst)


@implementations
def test_the_window_after_each_draft_has_a_slot_of_its_own(name: str):
    (weight, bias), rows = parameters(4, True), slice_of_a_projection(2 * 3)
    pool, sources = poisoned_windows(3, [7, 2]), [7, 2]
    before, dst = pool.clone(), [[5, 6, 7], [9, 3, 2]]

    y = UPDATE[name](rows, weight, bias, pool, StateSource.of(sources, DEVICE), torch.tensor(dst, device=DEVICE))

    for i, source in enumerate(sources):
        some = slice(3 * i, 3 * i + 3)
        expected, windows = naive_conv(rows[some], weight, bias, before[source])
        torch.testing.assert_close(y[some].double(), expected, atol=1e-5, rtol=1e-5)
        for window, slot in zip(windows, dst[i], strict=True):
            assert torch.equal(pool[slot].double(), window)
    assert_only_changed(before, pool, [slot for slots in dst for slot in slots])


def test_a_row_without_a_destination_changes_no_slot():
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    before, source = pool.clone(), StateSource.of([7, None], DEVICE)
    rows = slice_of_a_projection(2)
    causal_conv1d_update_triton(rows, weight, bias, pool, source, torch.tensor([7, -1], device=DEVICE))
    assert_only_changed(before, pool, [7])


def test_rows_without_a_place_for_their_windows_are_refused():
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    source, dst = StateSource.of([7], DEVICE), torch.tensor([7], device=DEVICE)
    with pytest.raises(ValueError, match="disagree"):
        causal_conv1d_update(slice_of_a_projection(1), weight, bias, pool[:, :, :2], source, dst)
    with pytest.raises(ValueError, match=r"3 rows and destination slots \(2,\) disagree"):
        causal_conv1d_update(slice_of_a_projection(3), weight, bias, pool, source, torch.tensor([7, 8], device=DEVICE))


KILOBYTES_IN_FLIGHT = 32  # of loads a multiprocessor: 4.8 TB/s over 132 of them, 0.7 us until the bytes arrive


@pytest.mark.parametrize("drafts", [0, 3])
def test_convolution_steps_stay_in_registers(drafts: int):
    tile_c, num_warps = launch_shape(4352)
    types = CONV_TYPES | {"src_ptr": "*i64", "dst_ptr": "*i64"}
    sizes = {"C": 4352, "K": 4, "SILU": True, "W": 3, "T": 1 + drafts, "TILE_C": tile_c}
    kernel = "headrace.kernels.conv.update:_causal_conv1d_update_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, num_warps)])
    assert report.stack_bytes == 0
    # Inputs and windows that a thread reads from memory. They are half of the traffic: the other half is written.
    channels, inputs = tile_c // (32 * num_warps), 3 + 1 + drafts
    assert report.resident_warps * 32 * channels * inputs * 2 >= KILOBYTES_IN_FLIGHT * 1024 / 2
