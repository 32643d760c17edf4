"""The scans' parts by hand, as an H200 gets them: products of registers, loads ahead of use, no spills."""

import torch

from tests.kernels.test_scan_compiles import types
from tests.support.kernels.compiled import Launch, compile_for_h200

BF16 = torch.bfloat16


def test_parts_by_hand_compile_for_an_h200():
    eighths = ("x_eighths", "B_eighths", "C_eighths")
    gdn = types("k u w start", "decay to_end pool", "chunks sequences", "slot", BF16) | {"k_eighths": "i32"}
    launches = [
        Launch(
            "headrace.kernels.ssd.scan_hopper:_ssd_hopper_outputs_kernel",
            types("x B C start y", "D decay chunk_dt", "chunks", "", BF16) | dict.fromkeys(eighths, "i32"),
            {"H": 64, "P": 64, "N": 128, "HEADS_A_GROUP": 64, "HEADS": 8, "ROWS": 64},
        ),
        Launch(
            "headrace.kernels.gdn.scan_hopper:_gdn_hopper_states_kernel",
            gdn,
            {"H": 32, "R": 2, "K": 128, "V": 128, "Q": 64, "COLUMNS": 64},
        ),
    ]
    for report, products in zip(compile_for_h200(launches), (32, 12), strict=True):
        assert report.stack_bytes == 0, report
        assert report.ptx.count("wgmma.mma_async") == products
        assert "cp.async.cg" in report.ptx
        assert "v4.b32" in report.accesses("st.global"), report
