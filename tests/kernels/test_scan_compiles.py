"""The prefill scans as an H200 gets them, at the real models' sizes: no spills, matrix units, loads ahead of use."""

import pytest
import torch

from headrace.kernels.gdn.scan import GdnTiles, gdn_tiles
from headrace.kernels.lib.dot import dot_block, swizzle_block
from headrace.kernels.ssd.scan import SsdTiles, ssd_tiles
from tests.support.kernels.compiled import Compiled, Launch, compile_for_h200

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def types(inputs: str, floats: str, tables: str, strides: str, dtype: torch.dtype) -> dict[str, str]:
    """Of arguments `x_ptr` in the model's dtype, of float32 and table pointers, and of strides `x_stride`."""
    named = {f"{name}_ptr": f"*{NAMES[dtype]}:16" for name in inputs.split()}
    named |= {f"{name}_ptr": "*fp32:16" for name in floats.split()}
    named |= {f"{name}_ptr": "*i32:16" for name in tables.split()}
    return named | {f"{name}_stride": "i32:16" for name in strides.split()}


def ssd_launches(
    tiles: SsdTiles, dtype: torch.dtype, H: int = 64, P: int = 64, N: int = 128, G: int = 1
) -> list[Launch]:
    module, Q = "headrace.kernels.ssd.scan", tiles.chunk_size
    sizes = {"H": H, "P": P, "N": N, "HEADS_A_GROUP": H // G, "Q": Q, "BLOCK_P": dot_block(P)}
    return [
        Launch(
            f"{module}:_ssd_decay_kernel",
            types("dt", "A bias decay chunk_dt", "chunks", "dt", dtype),
            {"H": H, "Q": Q, "BLOCK_H": 16, "DT_MIN": 0.0, "DT_MAX": float("inf")},
        ),
        Launch(
            f"{module}:_ssd_states_kernel",
            types("x B start", "decay chunk_dt pool", "chunks sequences", "x B slot", dtype),
            sizes | {"BLOCK_N": min(tiles.state_columns, dot_block(N))},
            tiles.states_warps,
            tiles.states_stages,
        ),
        Launch(
            f"{module}:_ssd_output_kernel",
            types("x B C start y", "D decay chunk_dt", "chunks", "x B C", dtype),
            sizes
            | {"HEADS": tiles.output_heads, "BLOCK_M": tiles.output_rows}
            | {"BLOCK_P": swizzle_block(P, dtype), "BLOCK_N": swizzle_block(N, dtype)},
            tiles.output_warps,
            tiles.output_stages,
        ),
    ]


def gdn_launches(
    tiles: GdnTiles, dtype: torch.dtype, H: int = 32, R: int = 2, K: int = 128, V: int = 128
) -> list[Launch]:
    module, Q = "headrace.kernels.gdn.scan", tiles.chunk_size
    sizes = {"H": H, "R": R, "K": K, "V": V, "Q": Q, "BLOCK_K": K}
    return [
        Launch(
            "headrace.kernels.gdn.systems:_gdn_systems_kernel",
            types("k v a b u w", "A bias decay to_end", "chunks", "k v a b", dtype),
            sizes
            | {"BLOCK_K": swizzle_block(K, dtype), "BLOCK_V": swizzle_block(V, dtype)}
            | {"EPS": 1e-6, "EXACT": dtype == torch.float32, "FETCH": dtype != torch.float32},
            tiles.systems_warps,
            registers=tiles.systems_registers,
        ),
        Launch(
            f"{module}:_gdn_states_kernel",
            types("k u w start", "decay to_end pool", "chunks sequences", "k slot", dtype),
            sizes | {"BLOCK_V": tiles.state_columns},
            tiles.states_warps,
            tiles.states_stages,
        ),
        Launch(
            f"{module}:_gdn_output_kernel",
            types("q k values start o", "decay", "chunks", "q k", dtype),
            sizes | {"EPS": 1e-6, "BLOCK_V": tiles.output_columns},
            tiles.output_warps,
            tiles.output_stages,
            tiles.output_registers,
        ),
    ]


def assert_keeps_to_registers_and_matrix_units(first: Compiled, *others: Compiled, spilled: int = 0) -> None:
    assert first.stack_bytes <= spilled, first
    for report in others:
        assert report.stack_bytes <= spilled, report
        assert "wgmma.mma_async" in report.ptx
        assert "cp.async" in report.ptx  # what the next chunk or head needs is on its way meanwhile
        assert report.accesses("st.global")[0] == "v4.b32", report


@pytest.mark.parametrize(("H", "N", "G"), [(64, 128, 1), (24, 256, 1)], ids=["granite", "falcon"])
def test_ssd_scan(H: int, N: int, G: int):
    launches = ssd_launches(ssd_tiles(torch.bfloat16, H // G, N, 8192), torch.bfloat16, H=H, N=N, G=G)
    assert_keeps_to_registers_and_matrix_units(*compile_for_h200(launches))


def test_ssd_outputs_of_few_rows():
    *_, outputs = ssd_launches(ssd_tiles(torch.bfloat16, 64, 128, 16), torch.bfloat16)
    [report] = compile_for_h200([outputs])
    assert report.stack_bytes == 0 and "wgmma.mma_async" in report.ptx


@pytest.mark.parametrize("num_rows", [16, 8192])
@pytest.mark.parametrize(("P", "N"), [(16, 24), (32, 64), (64, 32)], ids=str)
def test_ssd_scan_of_small_heads_reads_what_was_written(P: int, N: int, num_rows: int):
    launches = ssd_launches(ssd_tiles(torch.bfloat16, 8, N, num_rows), torch.bfloat16, H=8, P=P, N=N)
    *_, outputs = compile_for_h200(launches)  # it checks
    assert "wgmma.mma_async" in outputs.ptx


def test_gdn_scan():
    systems, states, outputs = compile_for_h200(gdn_launches(gdn_tiles(torch.bfloat16), torch.bfloat16))
    # Three programs on a multiprocessor for a few words that go to memory: 5 % faster on an H200 (docs/gpu-notes.md).
    assert_keeps_to_registers_and_matrix_units(systems, states, outputs, spilled=96)
    assert states.stack_bytes == 0
    assert systems.resident_warps == outputs.resident_warps == 12


@pytest.mark.parametrize(("K", "V"), [(8, 6), (32, 32), (64, 64)], ids=str)
def test_gdn_scan_of_small_heads_reads_what_was_written(K: int, V: int):
    systems = gdn_launches(gdn_tiles(torch.bfloat16), torch.bfloat16, H=4, K=K, V=V)[0]
    compile_for_h200([systems])  # it checks


@pytest.mark.parametrize("scan", ["ssd", "gdn"])
def test_float32_spills_little_if_anything(scan: str):
    dtype = torch.float32
    launches = (
        ssd_launches(ssd_tiles(dtype, 64, 128, 8192), dtype) if scan == "ssd" else gdn_launches(gdn_tiles(dtype), dtype)
    )
    for report in compile_for_h200(launches):
        assert report.stack_bytes < 256, report
