"""The Triton scan of Mamba1 against token-by-token float64, and as an H200 gets it."""

from collections.abc import Callable

import pytest
import torch

from headrace.kernels.mamba1.scan import mamba1_tile
from tests.kernels.mamba1.layers import Scan
from tests.kernels.scans import DTYPES, RealScanTests, SmallScanTests, check, native
from tests.support.kernels.compiled import Launch, compile_for_h200


@pytest.mark.parametrize("make", [lambda: Scan(12, 5)], ids=["12 channels of 5 states"])
class TestTriton(SmallScanTests):
    """Sizes that the interpreter can run, and fewer rows than chunked scans need: eight are read at a time."""

    @DTYPES
    def test_states_go_from_any_slots_to_any_slots(self, make: Callable[[], Scan], dtype: torch.dtype):
        lengths, src = [17, 3, 1, 9, 8], [3, None, 11, None, 5]
        dst = [3, 22, 17, 18, 0]  # the first sequence overwrites its own source
        check(make(), lengths, src, [(i, n, dst[i]) for i, n in enumerate(lengths)], dtype)

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 33])
    def test_sequences_of_any_length(self, make: Callable[[], Scan], length: int):
        check(make(), [length], [2], [(0, length, 1)], torch.float32)

    @DTYPES
    def test_states_at_many_rows_come_with_the_same_pass(self, make: Callable[[], Scan], dtype: torch.dtype):
        rows = [(0, 1), (0, 8), (0, 16), (0, 19), (0, 24), (1, 5), (1, 16)]
        check(make(), [26, 17], [3, None], [(*row, 20 - i) for i, row in enumerate(rows)], dtype)


def test_channels_of_several_programs():
    check(Scan(20, 9), [9], [3], [(0, 9, 1)], torch.float32)


@native
@pytest.mark.parametrize("make", [lambda: Scan(8192, 16), lambda: Scan(5120, 16)], ids=["jamba mini", "jamba2 3b"])
class TestTritonOnTheGpu(RealScanTests):
    """Sizes of real models."""


def scan_launch() -> Launch:
    tile = mamba1_tile(16)
    types = {f"{name}_ptr": "*bf16:16" for name in ("x", "dt", "B", "C", "gate", "y")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "D", "bias", "pool")}
    types |= {"chunks_ptr": "*i32:16", "sequences_ptr": "*i32:16"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C", "gate", "slot")}
    sizes = {"WIDTH": 8192, "N": 16, "BLOCK_I": tile.channels, "PADDED_N": 16, "ROWS": tile.rows}
    return Launch("headrace.kernels.mamba1.scan:_mamba1_scan_kernel", types, sizes, tile.num_warps)


def test_states_stay_in_registers():
    [report] = compile_for_h200([scan_launch()])
    assert report.stack_bytes == 0 == report.shared_bytes, report
    tile = mamba1_tile(16)
    assert report.resident_warps * 132 >= 8192 // tile.channels * tile.num_warps  # one sequence's programs all run
