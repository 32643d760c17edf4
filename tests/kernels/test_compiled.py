"""Kernels compiled for an H200: the report follows the kernel, a failure has the compiler's message."""

import pytest

from tests.support.kernels.compiled import Launch, compile_for_h200
from tests.support.kernels.sass import reads_of_nothing, sums_of_one_half

COPY = "tests.support.kernels.compiled_example:copy_kernel"


def test_reports_follow_the_kernel():
    types = {"src_ptr": "*bf16:16", "dst_ptr": "*bf16:16", "length": "i32:16"}
    wide, narrow = compile_for_h200(
        [
            Launch(COPY, types, {"BLOCK": 4096}, num_warps=4),
            Launch(COPY, {**types, "src_ptr": "*bf16"}, {"BLOCK": 128}, num_warps=1),
        ]
    )
    assert wide.accesses("ld.global") == ["v4.b32"] == wide.accesses("st.global")
    assert narrow.accesses("ld.global") == ["b16"]
    assert 8 <= narrow.registers <= wide.registers <= 64
    assert wide.stack_bytes == narrow.stack_bytes == wide.shared_bytes == 0
    assert wide.resident_warps == 64 and narrow.resident_warps == 32  # at most 32 blocks of one warp


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(AssertionError, match="power of 2"):
        compile_for_h200([Launch(COPY, {"src_ptr": "*i8", "dst_ptr": "*i8", "length": "i32"}, {"BLOCK": 24})])


def test_arguments_must_be_the_kernels():
    with pytest.raises(AssertionError, match="'BLOCK'"):
        compile_for_h200([Launch(COPY, {"src_ptr": "*i8", "dst_ptr": "*i8", "length": "i32"}, {})])


def listing(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(instructions))


def test_a_register_is_read_before_it_is_written():
    """As ptxas of CUDA 12.8 began the second descriptor of a product: UR5 was never written."""
    first = ["UMOV UR10, 0x40", "UMOV UR11, 0xc0000010", "HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR8].tnspB, RZ, !UPT"]
    lost = "UIADD3 UR4, UP0, UR5, 0x20, URZ"
    assert reads_of_nothing(listing(*first, "UIADD3 UR4, UP0, UR10, 0x20, URZ")) == []
    assert reads_of_nothing(listing(*first, lost, "UMOV UR14, UR4")) == [lost]


def test_descriptors_are_pairs_of_registers():
    pairs = listing("ULDC.64 UR4, c[0x0][0x208]", "LDG.E R3, desc[UR4][R2.64]", "UIADD3.64 UR6, UR4, 0x20, URZ")
    both = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0"
    assert reads_of_nothing(f"{pairs}\n{listing(both)}") == []
    assert reads_of_nothing(listing("UMOV UR6, 0x40", "UMOV UR7, 0x1", both)) == [both]


def test_a_register_made_uniform_is_written_beside_a_predicate():
    agreed = ["@P0 R2UR P1, UR6, R28", "@P0 R2UR.OR P1, UR7, R29", "UBLKPF.L2 [UR6], UR7"]
    assert reads_of_nothing(listing(*agreed)) == []


def test_both_halves_of_an_address_come_from_one_register():
    """As ptxas of CUDA 12.8 made another second descriptor: UR18 holds what global memory is read by."""
    low, high = "UIADD3 UR4, UP0, UR18, 0x20, URZ", "UIADD3.X UR7, UR18, -0x3ffffff0, URZ, UP0, !UPT"
    assert sums_of_one_half(listing(low, "UIADD3 UR5, UR18, 0x1, URZ", high)) == [high]
    assert sums_of_one_half(listing(low, high.replace("UR18", "UR5"))) == []
    assert sums_of_one_half(listing(low, "UIADD3 UR8, UP0, UR9, 0x2, URZ", high)) == []
