"""Mamba1 decode steps against token-by-token float64: the torch reference, the Triton kernel."""

import pytest

from headrace.kernels.mamba1.update import update_tile
from tests.kernels.mamba1.layers import Update
from tests.kernels.recurrences import Case, UpdateTests
from tests.kernels.updates import RealUpdateTests, SmallUpdateTests, needs_gpu
from tests.support.kernels.compiled import Launch, compile_for_h200


@pytest.mark.parametrize("case", [Case("mamba1", (8, 5), 5e-5)], ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""


@pytest.mark.parametrize("case", [Update(70, 6), Update(20, 16)], ids=str)
class TestTriton(SmallUpdateTests):
    """The Triton kernel."""


@needs_gpu
@pytest.mark.parametrize("case", [Update(8192, 16), Update(5120, 16)], ids=str)
class TestTritonOnTheGpu(RealUpdateTests):
    """The Triton kernel at real sizes."""


def test_states_are_moved_in_wide_accesses():
    block_i, num_warps = update_tile(16)
    types = {f"{name}_ptr": "*bf16:16" for name in ("x", "dt", "B", "C", "gate", "y")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "D", "bias", "pool")} | {"src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C", "gate", "slot")}
    sizes = {"T": 1, "WIDTH": 8192, "N": 16, "BLOCK_I": block_i, "PADDED_N": 16}
    launch = Launch("headrace.kernels.mamba1.update:_mamba1_update_kernel", types, sizes, num_warps)
    [report] = compile_for_h200([launch])
    assert report.stack_bytes == 0
    assert {"v4.b32"} <= set(report.accesses("ld.global")) & set(report.accesses("st.global")), report
