"""The causal convolution, packed and step by step, in Triton and in torch against token-by-token float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.conv.prefill import causal_conv1d_torch, causal_conv1d_triton
from headrace.kernels.conv.update import causal_conv1d_update, causal_conv1d_update_torch, causal_conv1d_update_triton
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from tests.kernels.naive import NAN, naive_conv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS = 24
C = 20
implementations = pytest.mark.parametrize("name", ["torch", "triton"])
PREFILL = {"torch": causal_conv1d_torch, "triton": causal_conv1d_triton}
UPDATE = {"torch": causal_conv1d_update_torch, "triton": causal_conv1d_update_triton}
Prefill = Callable[..., Tensor]


def slice_of_a_projection(rows: int, channels: int = C, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, channels + 24, device=DEVICE).to(dtype)[:, 16 : 16 + channels]


def parameters(taps: int, has_bias: bool, channels: int = C, dtype=torch.float32) -> tuple[Tensor, Tensor | None]:
    weight, bias = torch.randn(channels, taps, device=DEVICE), torch.randn(channels, device=DEVICE)
    return weight.to(dtype), bias.to(dtype) if has_bias else None


def poisoned_windows(window: int, live: list[int], channels: int = C, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's view of a pool of three layers: NaN but for the live slots."""
    pool = torch.full((NUM_SLOTS, 3, channels, window), NAN, dtype=dtype, device=DEVICE)[:, 1]
    for slot in live:
        pool[slot] = torch.randn(channels, window, device=DEVICE)
    return pool


def assert_only_changed(before: Tensor, after: Tensor, slots: list[int]) -> None:
    kept = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(before[kept].nan_to_num(12345.0), after[kept].nan_to_num(12345.0))


def check_prefill(name: str, lengths, taps: int, has_bias: bool, channels: int = C, dtype=torch.float32) -> None:
    """Every second sequence is fresh, the first overwrites its source; windows after rows in between, too."""
    src = [None if i % 2 else 11 - i for i in range(len(lengths))]
    pool = poisoned_windows(taps - 1, [slot for slot in src if slot is not None], channels, dtype)
    before, u = pool.clone(), slice_of_a_projection(sum(lengths), channels, dtype)
    weight, bias = parameters(taps, has_bias, channels, dtype)
    rows = {(i, n): 23 - 2 * i for i, n in enumerate(lengths)} | {(0, lengths[0]): src[0]}
    rows |= {(i, n // 2): 22 - 2 * i for i, n in enumerate(lengths) if n > 1}
    writes = [StateWrite(sequence, num_rows, slot) for (sequence, num_rows), slot in rows.items()]

    segments = PrefillSegments.build(lengths, src, writes, DEVICE)
    y = PREFILL[name](u, weight, bias, pool, segments)

    error = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 2**-7}
    for i, (u_i, y_i) in enumerate(zip(u.split(lengths), y.split(lengths), strict=True)):
        start = torch.zeros_like(before[0]) if src[i] is None else before[src[i]]
        expected, windows = naive_conv(u_i, weight, bias, start)
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
@pytest.mark.parametrize("src, dst", [([4], [4]), ([None], [21]), ([7, None, 2, 9, None], [7, 20, 19, 3, 0])], ids=str)
@pytest.mark.parametrize("taps, window, has_bias", [(4, 3, True), (3, 2, False), (4, 6, False)])
def test_a_step_equals_the_convolution(name: str, src, dst, taps: int, window: int, has_bias: bool):
    pool = poisoned_windows(window, [slot for slot in src if slot is not None])
    before, u = pool.clone(), slice_of_a_projection(len(src))
    weight, bias = parameters(taps, has_bias)

    y = UPDATE[name](u, weight, bias, pool, StateSource.of(src, DEVICE), torch.tensor(dst, device=DEVICE))

    for i, slot in enumerate(src):
        start = torch.zeros(C, taps - 1, device=DEVICE) if slot is None else before[slot, :, : taps - 1]
        expected, windows = naive_conv(u[i : i + 1], weight, bias, start)
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


@implementations
def test_empty_batches_change_nothing(name: str):
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    before, none = pool.clone(), slice_of_a_projection(0)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert UPDATE[name](none, weight, bias, pool, StateSource.of([], DEVICE), slots).shape == (0, C)
    if name == "triton":
        assert PREFILL[name](none, weight, bias, pool, PrefillSegments.build([], [], [], DEVICE)).shape == (0, C)
    assert_only_changed(before, pool, [])


def test_windows_too_short_for_the_drafts_are_refused():
    pool, (weight, bias) = poisoned_windows(3, [7]), parameters(4, True)
    source, dst = StateSource.of([7], DEVICE), torch.tensor([7], device=DEVICE)
    with pytest.raises(ValueError, match="disagree"):
        causal_conv1d_update(slice_of_a_projection(2), weight, bias, pool, source, dst)
    with pytest.raises(ValueError, match="3 rows are no multiple of 2 sequences"):
        causal_conv1d_update(slice_of_a_projection(3), weight, bias, pool, source, torch.tensor([7, 8], device=DEVICE))
