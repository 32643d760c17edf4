"""The compile helper itself: its figures follow the kernel, its failures carry the compiler's words."""

import pytest

from tests.support.compiled import Launch, compile_for_h200

COPY = "tests.support.compiled_example:copy_kernel"


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
