"""Steps of the causal convolution, in torch and in Triton, against token-by-token float64."""

import pytest
import torch

from headrace.kernels.conv.update import causal_conv1d_update, causal_conv1d_update_triton, launch_shape
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from tests.kernels.conv.windows import (
    CONV_TYPES,
    DEVICE,
    PREFILL,
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
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_after_drafts_the_history_begins_behind_the_last_accepted_one(name: str, accepted: int):
    """Three rows at once, of which some are accepted; then two more, by the prefill kernel or by a step."""
    (weight, bias), rows = parameters(4, True), slice_of_a_projection(3 + 2)
    pool = poisoned_windows(5, [7])
    start, dst = pool[7, :, :3].clone(), torch.tensor([7], device=DEVICE)
    rest = rows[3:]
    expected, windows = naive_conv(torch.cat((rows[:accepted], rest)), weight, bias, start)

    drafts = UPDATE[name](rows[:3], weight, bias, pool, StateSource.of([7], DEVICE), dst)
    torch.testing.assert_close(drafts.double(), naive_conv(rows[:3], weight, bias, start)[0], atol=1e-5, rtol=1e-5)

    packed, offsets = pool.clone(), [accepted - 1]
    segments = PrefillSegments.build([2], [7], [StateWrite(0, 2, 7)], DEVICE, offsets)
    for y in (
        PREFILL[name](rest, weight, bias, packed, segments),
        UPDATE[name](rest, weight, bias, pool, StateSource.of([7], DEVICE, offsets), dst),
    ):
        torch.testing.assert_close(y.double(), expected[accepted:], atol=1e-5, rtol=1e-5)
    assert torch.equal(packed[7, :, :3].double(), windows[-1])
    assert torch.equal(pool[7, :, 1:4].double(), windows[-1])  # after both rows: one further on


def test_a_row_without_a_destination_changes_no_slot():
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    before, source = pool.clone(), StateSource.of([7, None], DEVICE)
    rows = slice_of_a_projection(2)
    causal_conv1d_update_triton(rows, weight, bias, pool, source, torch.tensor([7, -1], device=DEVICE))
    assert_only_changed(before, pool, [7])


def test_windows_too_short_for_the_drafts_are_refused():
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    source, dst = StateSource.of([7], DEVICE), torch.tensor([7], device=DEVICE)
    with pytest.raises(ValueError, match="disagree"):
        causal_conv1d_update(slice_of_a_projection(2), weight, bias, pool, source, dst)
    with pytest.raises(ValueError, match="3 rows are no multiple of 2 sequences"):
        causal_conv1d_update(slice_of_a_projection(3), weight, bias, pool, source, torch.tensor([7, 8], device=DEVICE))


KILOBYTES_IN_FLIGHT = 32  # of loads a multiprocessor: 4.8 TB/s over 132 of them, 0.7 us until the bytes arrive


@pytest.mark.parametrize("drafts", [0, 3])
def test_convolution_steps_stay_in_registers(drafts: int):
    tile_c, num_warps = launch_shape(4352)
    types = CONV_TYPES | {"src_ptr": "*i64", "dst_ptr": "*i64"} | ({"offset_ptr": "*i64"} if drafts else {})
    sizes = {"C": 4352, "K": 4, "SILU": True, "W": 3 + drafts, "T": 1 + drafts, "TILE_C": tile_c}
    sizes |= {} if drafts else {"offset_ptr": None}
    kernel = "headrace.kernels.conv.update:_causal_conv1d_update_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, num_warps)])
    assert report.stack_bytes == 0
    # Inputs and windows that a thread reads from memory. They are half of the traffic: the other half is written.
    channels, inputs = tile_c // (32 * num_warps), 3 + 1 + drafts
    assert report.resident_warps * 32 * channels * inputs * 2 >= KILOBYTES_IN_FLIGHT * 1024 / 2
