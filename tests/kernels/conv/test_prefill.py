"""The packed causal convolution, in torch and in Triton, against token-by-token float64."""

import pytest
import torch

from headrace.kernels.conv import prefill as causal_conv1d
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from tests.kernels.conv.windows import (
    CONV_SIZES,
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
from tests.kernels.recurrences import Case, PrefillTests
from tests.support.kernels.compiled import Launch, compile_for_h200

CASES = [Case("conv", (10, 3), 1e-5), Case("conv_bias", (10, 3), 1e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(PrefillTests):
    """The torch reference."""


def check_prefill(
    name: str, lengths, taps: int, has_bias: bool, channels: int = C, dtype=torch.float32, silu=True
) -> None:
    """Every second sequence is fresh, the first overwrites its source; windows after rows in between, too."""
    src = [None if i % 2 else 11 - i for i in range(len(lengths))]
    pool = poisoned_windows(taps - 1, [slot for slot in src if slot is not None], channels, dtype)
    before, u = pool.clone(), slice_of_a_projection(sum(lengths), channels, dtype)
    weight, bias = parameters(taps, has_bias, channels, dtype)
    rows = {(i, n): 23 - 2 * i for i, n in enumerate(lengths)} | {(0, lengths[0]): src[0]}
    rows |= {(i, n // 2): 22 - 2 * i for i, n in enumerate(lengths) if n > 1}
    writes = [StateWrite(sequence, num_rows, slot) for (sequence, num_rows), slot in rows.items()]

    segments = PrefillSegments.build(lengths, src, writes, DEVICE)
    y = PREFILL[name](u, weight, bias, pool, segments, silu)

    error = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 2**-7}
    for i, (u_i, y_i) in enumerate(zip(u.split(lengths), y.split(lengths), strict=True)):
        start = torch.zeros_like(before[0]) if src[i] is None else before[src[i]]
        expected, windows = naive_conv(u_i, weight, bias, start, silu)
        torch.testing.assert_close(y_i.double(), expected, **error)
        for write in writes:
            if write.sequence == i:
                assert torch.equal(pool[write.slot].double(), windows[write.num_rows - 1])
    assert_only_changed(before, pool, list(rows.values()))


@implementations
@pytest.mark.parametrize("lengths", [[1], [2], [3], [4], [63], [64], [65], [5, 1, 36, 2]], ids=str)
def test_packed_rows_and_windows_equal_the_convolution(name: str, lengths: list[int]):
    check_prefill(name, lengths, taps=4, has_bias=True)


@implementations
@pytest.mark.parametrize("taps, has_bias", [(3, True), (4, False), (2, False)])
def test_other_taps(name: str, taps: int, has_bias: bool):
    check_prefill(name, [7, 2, 1], taps, has_bias)


@implementations
def test_without_an_activation(name: str):
    check_prefill(name, [70, 2, 1], taps=3, has_bias=False, silu=False)


def test_bfloat16_windows_are_copies():
    check_prefill("triton", [9, 1], 4, True, dtype=torch.bfloat16)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: too many programs for the interpreter")
@pytest.mark.parametrize("channels, has_bias", [(4352, True), (8192, False)], ids=["granite-h-micro", "qwen35-4b"])
@pytest.mark.parametrize("lengths", [[1, 300, 64, 2], [4096]], ids=str)
def test_real_widths(channels: int, has_bias: bool, lengths: list[int]):
    check_prefill("triton", lengths, 4, has_bias, channels, torch.bfloat16)


@implementations
def test_a_window_after_every_row_comes_with_the_same_pass(name: str):
    pool = poisoned_windows(3, [0])
    before, u = pool.clone(), slice_of_a_projection(20)
    weight, bias = parameters(4, True)
    writes = [StateWrite(0, n, 23 - n) for n in range(20, 0, -1)]
    PREFILL[name](u, weight, bias, pool, PrefillSegments.build([20], [0], writes, DEVICE))
    _, windows = naive_conv(u, weight, bias, before[0])
    for write in writes:
        assert torch.equal(pool[write.slot].double(), windows[write.num_rows - 1])
    assert_only_changed(before, pool, [write.slot for write in writes])


@implementations
def test_empty_batches_change_nothing(name: str):
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    before, none = pool.clone(), slice_of_a_projection(0)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert UPDATE[name](none, weight, bias, pool, StateSource.of([], DEVICE), slots).shape == (0, C)
    if name == "triton":
        assert PREFILL[name](none, weight, bias, pool, PrefillSegments.build([], [], [], DEVICE)).shape == (0, C)
    assert_only_changed(before, pool, [])


def test_packed_convolution_reads_and_writes_sixteen_bytes():
    tile_t, tile_c, num_warps = causal_conv1d.launch_shape(4352)
    types = CONV_TYPES | {f"{name}_ptr": "*i32" for name in ("sequences", "tiles", "writes")} | {"num_sequences": "i32"}
    sizes = CONV_SIZES | {"TAPS": 4, "W": 3, "TILE_T": tile_t, "TILE_C": tile_c}
    [report] = compile_for_h200(
        [Launch("headrace.kernels.conv.prefill:_causal_conv1d_kernel", types, sizes, num_warps)]
    )
    assert report.stack_bytes == 0
    assert "v4.b32" in report.accesses("ld.global") and "v4.b32" in report.accesses("st.global")
    assert report.resident_warps >= 16
