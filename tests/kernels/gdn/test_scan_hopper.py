"""The delta rule's states for Hopper, as an H200 gets them: products of registers, loads ahead of use, no spills."""

import torch

from tests.kernels.scans import types
from tests.support.kernels.compiled import Launch, compile_for_h200


def test_it_compiles_for_an_h200():
    arguments = types("k u w start", "decay to_end pool", "chunks sequences", "slot", torch.bfloat16)
    launch = Launch(
        "headrace.kernels.gdn.scan_hopper:_gdn_hopper_states_kernel",
        arguments | {"k_eighths": "i32"},
        {"H": 32, "R": 2, "K": 128, "V": 128, "Q": 64, "COLUMNS": 64},
    )
    [report] = compile_for_h200([launch])
    assert report.stack_bytes == 0, report
    assert report.ptx.count("wgmma.mma_async") == 12
    assert "cp.async.cg" in report.ptx
    assert "v4.b32" in report.accesses("st.global"), report
