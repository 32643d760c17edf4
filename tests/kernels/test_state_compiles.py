"""The state kernels as an H200 gets them, at the real models' sizes: no spills, wide accesses to what is large."""

import pytest

from headrace.kernels.conv import prefill as causal_conv1d
from headrace.kernels.conv import update as causal_conv1d_update
from headrace.kernels.gdn import update as gdn_update
from headrace.kernels.ssd import update as ssd_update
from headrace.kernels.transfer import gather_scatter
from tests.support.kernels.compiled import Launch, compile_for_h200

KILOBYTES_IN_FLIGHT = 32  # of loads a multiprocessor: 4.8 TB/s over 132 of them, 0.7 us until the bytes arrive
POOLS = {"fp32": 4, "bf16": 2}
WORDS = {4: "b32", 8: "v2.b32", 16: "v4.b32"}  # by bytes


def ssd_launch(pool: str, batch: int, T: int) -> Launch:
    tile_p, num_warps = ssd_update.launch_shape(64)
    types = {name: "*bf16:16" for name in ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr")}
    types |= {name: "*fp32:16" for name in ("A_ptr", "D_ptr", "bias_ptr")}
    types |= {"pool_ptr": f"*{pool}:16", "src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C", "slot")}
    sizes = {"T": T, "H": 64, "P": 64, "N": 128, "HEADS_A_GROUP": 64, "TILE_P": tile_p, "PADDED_N": 128}
    sizes |= {"DT_MIN": 0.0, "DT_MAX": float("inf")}
    return Launch("headrace.kernels.ssd.update:_ssd_update_kernel", types, sizes, num_warps=num_warps)


def gdn_launch(pool: str, batch: int, T: int) -> Launch:
    tile = gdn_update.launch_shape(batch * 32, POOLS[pool])
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "k", "v", "a", "b", "o")}
    types |= {"A_ptr": "*fp32:16", "bias_ptr": "*fp32:16", "pool_ptr": f"*{pool}:16"}
    types |= {"src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "a", "b", "slot")}
    sizes = {"T": T, "H": 32, "DK": 128, "DV": 128, "HEADS_A_KEY": 2, "PADDED_K": 128}
    sizes |= {"TILE_V": tile.columns, "ACCESS": tile.access_bytes, "EPS": 1e-6}
    registers = tile.registers if T == 1 else None
    return Launch(
        "headrace.kernels.gdn.update:_gdn_update_kernel", types, sizes, num_warps=tile.num_warps, registers=registers
    )


@pytest.mark.parametrize("launch_of", [ssd_launch, gdn_launch])
def test_state_updates_keep_enough_bytes_in_flight(launch_of):
    cases = [(pool, batch, T) for pool in POOLS for batch, T in ((1, 1), (64, 1), (64, 4))]
    for (pool, batch, _), report in zip(cases, compile_for_h200([launch_of(*case) for case in cases]), strict=True):
        assert report.stack_bytes == 0, report
        launch = launch_of(pool, batch, 1)
        word = WORDS[launch.constexprs.get("ACCESS", 16)]
        assert report.accesses("st.global")[0] == word, report
        assert word in report.accesses("ld.global"), report
        if batch > 1:
            rows = launch.constexprs.get("TILE_P") or launch.constexprs["TILE_V"]
            tile_bytes = rows * 128 * POOLS[pool]
            resident = report.resident_warps // launch.num_warps
            assert resident * tile_bytes >= KILOBYTES_IN_FLIGHT * 1024, report


@pytest.mark.parametrize("to_pool", [False, True], ids=["gather", "scatter"])
def test_rows_are_copied_in_words_of_sixteen_bytes(to_pool: bool):
    tile, num_warps = gather_scatter.launch_shape(65536 // 8)
    types = {"pool_ptr": "*i64:16", "rows_ptr": "*i64", "staging_ptr": "*i64:16"}
    sizes = {"WORDS_A_ROW": 65536 // 8, "TILE": tile, "TO_POOL": to_pool}
    kernel = "headrace.kernels.transfer.gather_scatter:_copy_rows_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, num_warps=num_warps)])
    assert report.accesses("st.global") == ["v2.b64"]
    assert report.accesses("ld.global") == ["v2.b64", "b64"]  # the words, and the row's number
    assert report.stack_bytes == report.shared_bytes == 0
    assert report.resident_warps == 64


CONV_TYPES = {f"{name}_ptr": "*bf16:16" for name in ("u", "weight", "bias", "pool", "y")} | {
    "u_stride": "i32:16",
    "slot_stride": "i32:16",
}
CONV_SIZES = {"C": 4352, "K": 4, "offset_ptr": None}


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


@pytest.mark.parametrize("drafts", [0, 3])
def test_convolution_steps_stay_in_registers(drafts: int):
    tile_c, num_warps = causal_conv1d_update.launch_shape(4352)
    types = CONV_TYPES | {"src_ptr": "*i64", "dst_ptr": "*i64"} | ({"offset_ptr": "*i64"} if drafts else {})
    sizes = {"C": 4352, "K": 4, "W": 3 + drafts, "T": 1 + drafts, "TILE_C": tile_c}
    sizes |= {} if drafts else {"offset_ptr": None}
    kernel = "headrace.kernels.conv.update:_causal_conv1d_update_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, num_warps)])
    assert report.stack_bytes == 0
    # Inputs and windows that a thread reads from memory. They are half of the traffic: the other half is written.
    channels, inputs = tile_c // (32 * num_warps), 3 + 1 + drafts
    assert report.resident_warps * 32 * channels * inputs * 2 >= KILOBYTES_IN_FLIGHT * 1024 / 2
