"""SSD's outputs for Hopper, as an H200 gets them: products of registers, loads ahead of use, no spills."""

import torch

from tests.kernels.scans import types
from tests.support.kernels.compiled import Launch, compile_for_h200


def test_it_compiles_for_an_h200():
    strides = dict.fromkeys(("x_eighths", "B_eighths", "C_eighths"), "i32")
    launch = Launch(
        "headrace.kernels.ssd.scan_hopper:_ssd_hopper_outputs_kernel",
        types("x B C start y", "D decay chunk_dt", "chunks", "", torch.bfloat16) | strides,
        {"H": 64, "P": 64, "N": 128, "HEADS_A_GROUP": 64, "HEADS": 8, "ROWS": 64},
    )
    [report] = compile_for_h200([launch])
    assert report.stack_bytes == 0, report
    assert report.ptx.count("wgmma.mma_async") == 32
    assert "cp.async.cg" in report.ptx
    assert "v4.b32" in report.accesses("st.global"), report
