"""Launches of kernels for the benchmarks' shapes: types and constants, as their launchers choose them on an H200."""

import math
from collections.abc import Iterator

import torch
import triton

from benchmarks.kernels.dense import GATED_WIDTH, NORM_WIDTHS, Product
from benchmarks.kernels.moe import MIXTURES, Mixture
from benchmarks.shapes import SHAPES
from headrace.kernels.attention.decode import decode_tile, tokens_at_once
from headrace.kernels.attention.prefill import PrefillTile, prefill_tile
from headrace.kernels.attention.prefill_hopper import HopperTile, hopper_tile
from headrace.kernels.dense.fp8 import BLOCK as FP8_BLOCK
from headrace.kernels.dense.fp8 import Fp8Matrix
from headrace.kernels.dense.fp8_rows import Fp8Format, row_warps
from headrace.kernels.dense.gated_rms_norm import gated_tile, token_tile
from headrace.kernels.dense.linear_pair import pair_sizes
from headrace.kernels.dense.one_round_hopper import Form as OneRoundForm
from headrace.kernels.dense.one_round_hopper import halves_of, registers_for, share_of, x_rows_of
from headrace.kernels.dense.one_round_hopper import num_stages as one_round_stages
from headrace.kernels.dense.rms_norm import row_tile
from headrace.kernels.dense.small_linear import NO_GROUPS, scale_groups, sizes, tile_for
from headrace.kernels.dense.swiglu_linear_hopper import COLUMNS, CONSUMERS, ROWS
from headrace.kernels.lib.dot import dot_block
from headrace.kernels.lib.hopper import LAYOUT, SPAN, launch_registers, registers, tile_layout
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.moe.experts import MoeTile, moe_tile
from headrace.kernels.moe.grouped_linear_hopper import SPAN_BYTES, Form, num_stages
from headrace.kernels.moe.grouping import ENTRIES, UNIT
from headrace.kernels.moe.quantise_grouped import VALUES
from headrace.kernels.transfer import state_rows
from tests.support.kernels.compiled import Launch

BF16 = torch.bfloat16
BLOCK = 16


def attention_launches() -> Iterator[tuple[str, Launch]]:
    """Launches of every attention kernel, for the benchmarks' shapes."""
    for model in SHAPES:
        c = SHAPES[model].attention
        H, KV, D, R = c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim
        yield f"prefill {model}", prefill_launch(H, KV, D, prefill_tile(D, BF16))
        for is_split in (False, True):
            yield f"prefill on Hopper {model}, split {is_split}", hopper_launch(H, KV, D, hopper_tile(D), is_split)
        for T in (1, 2, 4, 8):  # rows a sequence
            yield f"decode {model} {T}", decode_launch(H, KV, D, T)
            yield f"merge {model} {T}", merge_launch(H, KV, D, T)
        yield f"prepare {model}", prepare_launch(H, KV, D, R, c.has_qk_norm)
    for is_split in (False, True):
        launch = hopper_launch(32, 2, 128, hopper_tile(128), is_split)
        yield f"prefill on Hopper of heads of 128, split {is_split}", launch
    yield "prefill float32", prefill_launch(8, 2, 256, prefill_tile(256, torch.float32), "fp32")
    yield "decode of heads of 128", decode_launch(12, 3, 128, 4)
    yield "decode of heads of 128, twice the rows", decode_launch(12, 3, 128, 8)
    yield "decode of more rows than a program takes", decode_launch(16, 1, 64, 5)
    yield "decode float32", decode_launch(8, 2, 256, 1, "fp32")


def prefill_launch(H: int, KV: int, D: int, tile: PrefillTile, dtype: str = "bf16") -> Launch:
    types = {name: f"*{dtype}:16" for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")}
    types |= {"first_row_ptr": "*i32:16", "start_ptr": "*i32", "table_ptr": "*i32", "num_sequences": "i32"}
    types |= {"stride_q": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16", "stride_table": "i32"}
    group = H // KV
    constexprs = {"H": H, "HKV": KV, "GROUP": group, "PADDED_GROUP": group, "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"TOKENS": tile.rows // group, "KEYS": tile.keys}
    return Launch("headrace.kernels.attention.prefill:_prefill_kernel", types | {"scale_log2": "fp32"}, constexprs,
                  tile.num_warps, tile.num_stages)  # fmt: skip


def hopper_launch(H: int, KV: int, D: int, tile: HopperTile, is_split: bool) -> Launch:
    types = {name: "*bf16:16" for name in ("q_ptr", "v_ptr")}
    types |= {name: "*fp32:16" if is_split else "*bf16:16" for name in ("out_ptr", "log_sum_ptr")}
    types |= {name: f"tensordesc<bf16[{BLOCK},{SPAN.value}],{LAYOUT.value!r}>" for name in ("k_desc", "v_desc")}
    types |= {"first_row_ptr": "*i32:16", "start_ptr": "*i32", "table_ptr": "*i32", "num_sequences": "i32"}
    types |= {"num_items": "i32", "splits": "i32", "stride_q": "i32:16", "block_rows": "i32", "num_rows": "i32"}
    types |= {"stride_table": "i32", "scale_log2": "fp32"}
    group = H // KV
    constexprs = {"H": H, "HKV": KV, "GROUP": group, "PADDED_GROUP": group, "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"KEYS": tile.keys, "STAGES": tile.stages, "CONSUMERS": tile.consumers, "IS_SPLIT": is_split}
    constexprs |= dict(zip(("REGISTERS", "PRODUCER_REGISTERS"), registers(tile.consumers), strict=True))
    kernel = "headrace.kernels.attention.prefill_hopper:_hopper_prefill_kernel"
    return Launch(kernel, types, constexprs, 4, 1, launch_registers(tile.consumers))


def decode_launch(H: int, KV: int, D: int, T: int, dtype: str = "bf16") -> Launch:
    group, tokens = H // KV, tokens_at_once(T, H // KV)
    rows = dot_block(tokens * group)
    tile = decode_tile(D, BF16 if dtype == "bf16" else torch.float32, rows)
    types = {name: f"*{dtype}:16" for name in ("q_ptr", "k_ptr", "v_ptr")}
    types |= {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16"}
    types |= {"lens_ptr": "*i32", "table_ptr": "*i32", "stride_table": "i32", "num_tiles": "i32", "least_steps": "i32"}
    types |= {"stride_q": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16", "scale_log2": "fp32"}
    constexprs = {"H": H, "GROUP": group, "T": T, "TOKENS": tokens, "ROWS": rows, "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"KEYS": tile.keys, "SKIP_FIRST": False}
    return Launch(
        "headrace.kernels.attention.decode:_decode_kernel", types, constexprs, tile.num_warps, tile.num_stages
    )


def merge_launch(H: int, KV: int, D: int, T: int) -> Launch:
    tokens = tokens_at_once(T, H // KV)
    tile = decode_tile(D, BF16, dot_block(tokens * (H // KV)))
    types = {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16", "out_ptr": "*bf16:16", "lens_ptr": "*i32"}
    types |= {"num_tiles": "i32", "num_programs": "i32", "least_steps": "i32"}
    types |= {"gate_ptr": "*bf16:16", "stride_gate": "i32:16"}
    constexprs = {"H": H, "GROUP": H // KV, "T": T, "TOKENS": tokens, "D": D, "KEYS": tile.keys}
    constexprs |= {"HEADS": math.gcd(H, 4)}
    return Launch("headrace.kernels.attention.decode_merge:_merge_kernel", types, constexprs)


def prepare_launch(H: int, KV: int, D: int, R: int, has_norm: bool) -> Launch:
    types = {name: "*bf16:16" for name in ("x_ptr", "out_ptr", "k_pool_ptr", "v_pool_ptr")}
    types |= {"block_ptr": "*i64:16", "offset_ptr": "*i64:16", "eps": "fp32"}
    types |= {"stride_x": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16"}
    optional = {"norm_ptr": has_norm, "cos_ptr": R > 0, "sin_ptr": R > 0}
    types |= {name: "*fp32:16" for name, is_there in optional.items() if is_there}
    first = 0 if has_norm or R else H
    constexprs: dict[str, object] = {name: None for name, is_there in optional.items() if not is_there}
    constexprs |= {"FIRST_HEAD": first, "H": H, "HKV": KV, "D": D, "R": R, "HAS_NORM": has_norm, "BLOCK_D": D}
    heads = min(triton.next_power_of_2(H + 2 * KV - first), max(1, 2048 // D))
    return Launch("headrace.kernels.attention.prepare_qkv:_prepare_kernel", types, constexprs | {"BLOCK_HEADS": heads})


def product_launch(product: Product, M: int, fp8: Fp8Matrix | None = None) -> Launch:
    """`fp8`: a weight whose scales lie as this product's do; None: its weight has 16 bits."""
    groups = scale_groups(fp8) if fp8 else NO_GROUPS
    tile = tile_for(M, product.O, product.I, product.form == "parts", fp8.has_blocks if fp8 else None)
    out = "fp32" if product.form == "parts" else "bf16"
    value, value_bytes = ("fp8e4nv", 1) if fp8 else ("bf16", 2)
    types = {"x_ptr": f"*{value}:16", "weight_ptr": f"*{value}:16", "out_ptr": f"*{out}:16", "stride_x": "i32:16"}
    types |= {"M": "i32", "stride_scale": "i32"}
    scales = ("x_scale_ptr", "scale_ptr")
    types |= dict.fromkeys(scales, "*fp32:16") if fp8 else {}
    constexprs = {"OUT": product.O, "IN": product.I, "FORM": product.form}
    constexprs |= {**sizes(M, product.I, tile, value_bytes), **groups, **({} if fp8 else dict.fromkeys(scales))}
    return Launch(
        "headrace.kernels.dense.small_linear:_small_linear_kernel", types, constexprs, tile.num_warps, tile.num_stages
    )


def pair_launch(num_out: int, num_in: int, num_side: int, M: int, fp8: Fp8Matrix) -> Launch:
    """`fp8`: a weight whose scales lie as this one's do."""
    tile = tile_for(M, num_out, num_in, False, fp8.has_blocks)
    pointers = {"x_ptr": "fp8e4nv", "weight_ptr": "fp8e4nv", "x_scale_ptr": "fp32", "scale_ptr": "fp32"}
    pointers |= dict.fromkeys(("out_ptr", "plain_ptr", "side_ptr", "side_out_ptr"), "bf16")
    types = {name: f"*{dtype}:16" for name, dtype in pointers.items()}
    types |= {"stride_x": "i32:16", "stride_plain": "i32:16", "M": "i32", "stride_scale": "i32"}
    constexprs = {"OUT": num_out, "IN": num_in, **pair_sizes(M, num_in, num_side, tile), **scale_groups(fp8)}
    kernel = "headrace.kernels.dense.linear_pair:_linear_pair_kernel"
    return Launch(kernel, types, constexprs, tile.num_warps, tile.num_stages)


def swiglu_linear_launch(dtype: str = "bf16") -> Launch:
    def described(rows: int, columns: int) -> str:
        return f"tensordesc<{dtype}[{rows},{columns}],{LAYOUT.value!r}>"

    types = {"x_desc": described(ROWS.value, SPAN.value), "weight_desc": described(COLUMNS.value, SPAN.value)}
    types |= {"y_desc": described(ROWS.value, COLUMNS.value)}
    types |= {"num_row_tiles": "i32", "num_columns": "i32", "num_pieces": "i32"}
    consumers = CONSUMERS.value
    constexprs = dict(zip(("REGISTERS", "PRODUCER_REGISTERS"), registers(consumers), strict=True))
    kernel = "headrace.kernels.dense.swiglu_linear_hopper:_swiglu_linear_kernel"
    return Launch(kernel, types, constexprs, 4, 1, launch_registers(consumers))


def one_round_launch(M: int, width: int, num_in: int, form: OneRoundForm, dtype: str = "bf16") -> Launch:
    def described(rows: int, columns: int) -> str:
        return f"tensordesc<{dtype}[{rows},{columns}],{tile_layout(columns)!r}>"

    share, halves, consumers, x_rows = share_of(width, num_in, form), halves_of(form), cdiv(M, ROWS.value), x_rows_of(M)
    side, has_parts = share.side or share.main, share.parts > 1
    types = {"x_desc": described(x_rows, SPAN.value), "main_desc": described(share.main, SPAN.value)}
    types |= {"side_desc": described(side, SPAN.value), "num_rows": "i32", "eighths": "i32", "num_pieces": "i32"}
    types |= {"y_main": "*fp32:16" if has_parts else described(ROWS.value, share.main)}
    types |= {"y_side": "*fp32:16" if has_parts else described(ROWS.value, side)}
    constexprs = {"CONSUMERS": consumers, "STAGES": one_round_stages(consumers, halves * share.columns)}
    constexprs |= {"HALVES": halves, "MAIN": share.main, "SIDE": share.side, "PARTS": share.parts, "X_ROWS": x_rows}
    wanted = registers_for(consumers, halves * share.columns)
    constexprs |= {"REGISTERS": wanted.consumer, "PRODUCER_REGISTERS": wanted.producer}
    kernel = "headrace.kernels.dense.one_round_hopper:_one_round_kernel"
    return Launch(kernel, types, constexprs, 4, 1, wanted.launch)


GROUPED_FORMS = [
    (form, gathered, dtype)
    for form, gathered in (("swiglu", True), ("relu_squared", True), ("none", False))
    for dtype in ("bf16", "fp8e4nv")
]


def grouped_linear_launch(form: Form, gathered: bool, dtype: str) -> Launch:
    value_bytes = 2 if dtype == "bf16" else 1
    span = SPAN_BYTES.value // value_bytes

    def described(rows: int, columns: int) -> str:
        return f"tensordesc<{dtype}[{rows},{columns}],{tile_layout(columns, 8 * value_bytes)!r}>"

    types = {"x": f"*{dtype}:16" if gathered else described(ROWS.value, span)}
    types |= {"weight_desc": described(COLUMNS.value, span)}
    types |= {"y_desc": f"tensordesc<bf16[{ROWS.value},{COLUMNS.value}],{LAYOUT.value!r}>"}
    types |= {name: "*i32:16" for name in ("tiles_ptr", "used_ptr", "token_ptr")}
    types |= {"stride_x": "i32:16", "rows_an_expert": "i32", "num_column_tiles": "i32", "num_pieces": "i32"}
    constexprs = dict(zip(("REGISTERS", "PRODUCER_REGISTERS"), registers(CONSUMERS.value), strict=True))
    scales = ("x_scale_ptr", "weight_scale_ptr")
    if dtype == "bf16":
        constexprs |= dict.fromkeys(scales)
    else:
        types |= dict.fromkeys(scales, "*fp32:16")
    kernel = "headrace.kernels.moe.grouped_linear_hopper:_grouped_linear_kernel"
    constexprs |= {"FORM": form, "GATHERED": gathered, "STAGES": num_stages(form)}
    return Launch(kernel, types, constexprs, 4, 1, launch_registers(CONSUMERS.value))


def row_launches() -> Iterator[tuple[str, Launch]]:
    """Launches of norms, SwiGLU, experts and FP8's rows, for the benchmarks' shapes."""
    for model, width in NORM_WIDTHS.items():
        yield f"rms_norm {model}", norm_launch(width, False)
        yield f"add_rms_norm {model}", norm_launch(width, True)
        for fmt in FORMATS:
            yield f"rms_norm {model} {fmt}", norm_launch(width, False, fmt)
            yield f"add_rms_norm {model} {fmt}", norm_launch(width, True, fmt)
    for width in (2560, 14336):  # of products' inputs
        yield f"quantise rows {width}", quantise_launch(width, False)
        yield f"quantise blocks {width}", quantise_launch(width, True)
    for form in (None, *FORMATS):
        yield f"gate_then_norm {form}", gated_norm_launch(1, GATED_WIDTH, GATED_WIDTH, True, form)
        yield f"gate_then_norm in groups {form}", gated_norm_launch(8, 512, 512, True, form)
        yield f"norm_then_gate {form}", gated_norm_launch(32, 128, 0, False, form)
    for fmt in FORMATS:
        yield f"swiglu {fmt}", row_fp8_launch("swiglu", 9216, fmt)
        yield f"relu_squared {fmt}", row_fp8_launch("relu_squared", 12288, fmt)
    yield "swiglu", Launch("headrace.kernels.dense.swiglu:_swiglu_kernel",
                           {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "stride_x": "i32:16"},
                           {"INNER": 8192, "BLOCK": 2048})  # fmt: skip
    yield "relu_squared", Launch("headrace.kernels.dense.relu_squared:_relu_squared_kernel",
                                 {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "stride_x": "i32:16"},
                                 {"WIDTH": 21504, "BLOCK": 2048})  # fmt: skip
    for groups in (1, 8):
        yield f"route_sigmoid {groups}", route_sigmoid_launch(128, 6, groups)
    for mixture in MIXTURES:
        yield f"sort {mixture.name}", sort_launch(mixture)
        yield f"route {mixture.name}", route_launch(mixture)
        yield f"sum {mixture.name}", sum_launch(mixture, False)
        yield f"sum of placed {mixture.name}", sum_launch(mixture, True)
        yield from grouping_launches(mixture)
        for entries in (1, 50, 500):
            tile = moe_tile(entries, BF16)
            yield f"up {mixture.name} {tuple(tile)}", experts_launch(mixture, tile, "_up_kernel")
            yield f"down {mixture.name} {tuple(tile)}", experts_launch(mixture, tile, "_down_kernel")


FORMATS = [Fp8Format(by_block, keeps_plain) for by_block in (False, True) for keeps_plain in (False, True)]


def fp8_arguments(fmt: Fp8Format | None, plain: str = "out_ptr") -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of a kernel's outputs in this format, or in 16 bits alone."""
    fp8 = ("values_ptr", "scale_ptr")
    if fmt is None:
        return {plain: "*bf16:16", "stride_scale": "i32"}, {"GROUP": 0, **dict.fromkeys(fp8)}
    types = {"values_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "stride_scale": "i32"}
    types |= {plain: "*bf16:16"} if fmt.keeps_plain else {}
    return types, {"GROUP": fmt.group} | ({} if fmt.keeps_plain else {plain: None})


def row_fp8_launch(name: str, inner: int, fmt: Fp8Format) -> Launch:
    types, constexprs = fp8_arguments(fmt)
    width = triton.next_power_of_2(inner)
    constexprs |= {"INNER": inner, "WIDTH": width}
    kernel = f"headrace.kernels.dense.{name}:_{name}_fp8_kernel"
    return Launch(kernel, types | {"x_ptr": "*bf16:16", "stride_x": "i32:16"}, constexprs, row_warps(width))


def norm_launch(width: int, has_branch: bool, fmt: Fp8Format | None = None) -> Launch:
    rows, num_warps = row_tile(width)
    types, constexprs = fp8_arguments(fmt)
    types |= {"x_ptr": "*bf16:16", "weight_ptr": "*fp32:16", "num_rows": "i32"}
    types |= {f"stride_{name}": "i32:16" for name in ("x", "branch", "out")} | {"alpha": "fp32", "eps": "fp32"}
    constexprs |= {"num_weights": 1, "D": width, "PARTS": int(has_branch), "ROWS": 1 if fmt else rows}
    optional = ("branch_ptr", "sum_ptr")
    if has_branch:
        types |= {name: "*bf16:16" for name in optional}
    else:
        constexprs |= {name: None for name in optional}
    constexprs["BLOCK_D"] = triton.next_power_of_2(width)
    return Launch("headrace.kernels.dense.rms_norm:_rms_norm_kernel", types, constexprs, num_warps)


def quantise_launch(width: int, by_block: bool) -> Launch:
    types = {"x_ptr": "*bf16:16", "out_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "stride_x": "i32:16"}
    types |= {"stride_scale": "i32"}
    group = FP8_BLOCK if by_block else triton.next_power_of_2(width)
    constexprs = {"IN": width, "GROUPS": triton.next_power_of_2(triton.cdiv(width, group)), "WIDTH": group}
    kernel = "headrace.kernels.dense.fp8:_quantise_kernel"
    return Launch(kernel, types, constexprs, num_warps=4 if width <= 4096 else 8)


def gated_norm_launch(
    groups: int, width: int, weight_stride: int, gate_first: bool, fmt: Fp8Format | None = None
) -> Launch:
    rows, num_warps = token_tile(groups, width) if fmt else gated_tile(64 * groups, width)
    types, constexprs = fp8_arguments(fmt)
    types |= {"x_ptr": "*bf16:16", "gate_ptr": "*bf16:16", "weight_ptr": "*fp32:16"}
    types |= {"num_rows": "i32", "stride_x": "i32:16", "stride_gate": "i32:16", "eps": "fp32"}
    constexprs |= {
        "GROUPS": groups,
        "D": width,
        "WEIGHT_STRIDE": weight_stride,
        "GATE_FIRST": gate_first,
        "SIGMOID": False,
    }
    constexprs |= {"ROWS": rows, "BLOCK_D": width}
    return Launch("headrace.kernels.dense.gated_rms_norm:_gated_norm_kernel", types, constexprs, num_warps)


def sort_launch(mixture: Mixture) -> Launch:
    types = {"expert_ptr": "*i32:16", "order_ptr": "*i32:16", "tiles_ptr": "*i32:16", "n": "i32"}
    constexprs = {"E": mixture.num_experts, "ROWS": 16, "IS_FEW": False, "BLOCK": 1024}
    return Launch("headrace.kernels.moe.experts:_sort_kernel", types, constexprs)


def grouping_launches(mixture: Mixture) -> Iterator[tuple[str, Launch]]:
    module, E = "headrace.kernels.moe.grouping", mixture.num_experts
    entries = {name: "*i32:16" for name in ("expert_ptr", "rank_ptr")} | {"n": "i32:16"}
    rank = Launch(f"{module}:_rank_kernel", entries | {"count_ptr": "*i32:16"}, {"BLOCK": ENTRIES})
    yield f"rank {mixture.name}", rank
    types = {name: "*i32:16" for name in ("count_ptr", "first_ptr", "tiles_ptr", "used_ptr")}
    constexprs = {"E": E, "PADDED_E": triton.next_power_of_2(E), "UNIT": UNIT}
    yield f"tiles {mixture.name}", Launch(f"{module}:_tiles_kernel", types, constexprs)
    types = entries | {name: "*i32:16" for name in ("first_ptr", "place_ptr", "token_ptr")}
    constexprs = {"CHOICES": mixture.chosen, "BLOCK": ENTRIES}
    yield f"place {mixture.name}", Launch(f"{module}:_place_kernel", types, constexprs)
    types = {"x_ptr": "*bf16:16", "out_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16"}
    types |= {"tiles_ptr": "*i32:16", "used_ptr": "*i32:16"}
    padded = triton.next_power_of_2(mixture.inner)
    constexprs = {"IN": mixture.inner, "PADDED_IN": padded, "ROWS": VALUES // padded, "TILE_ROWS": 2 * UNIT}
    module = "headrace.kernels.moe.quantise_grouped"
    yield f"quantise grouped {mixture.name}", Launch(f"{module}:_quantise_grouped_kernel", types, constexprs)


def route_launch(mixture: Mixture) -> Launch:
    types = {"logits_ptr": "*fp32:16", "weight_ptr": "*fp32:16", "expert_ptr": "*i32:16", "stride_logits": "i32:16"}
    E, k = mixture.num_experts, mixture.chosen
    constexprs = {"E": E, "PADDED_E": triton.next_power_of_2(E), "K": k, "PADDED_K": triton.next_power_of_2(k)}
    return Launch("headrace.kernels.moe.routing:_route_kernel", types, constexprs | {"RENORMALIZE": True}, num_warps=1)


def route_sigmoid_launch(E: int, k: int, groups: int) -> Launch:
    types = {name: "*fp32:16" for name in ("logits_ptr", "bias_ptr", "weight_ptr")}
    types |= {"expert_ptr": "*i32:16", "stride_logits": "i32:16", "scale": "fp32"}
    constexprs = {"E": E, "PADDED_E": triton.next_power_of_2(E), "K": k, "PADDED_K": triton.next_power_of_2(k)}
    constexprs |= {"HAS_BIAS": True, "GROUPS": groups, "CHOSEN_GROUPS": (groups + 1) // 2, "RENORMALIZE": True}
    kernel = "headrace.kernels.moe.sigmoid_routing:_route_sigmoid_kernel"
    return Launch(kernel, types, constexprs | {"SMALLEST": 1e-20}, num_warps=1)


def sum_launch(mixture: Mixture, is_placed: bool) -> Launch:
    types = {name: "*bf16:16" for name in ("outputs_ptr", "x_ptr", "gate_ptr", "out_ptr")} | {"shared_ptr": "*fp32:16"}
    constexprs = {"D": mixture.hidden, "K": mixture.chosen, "PARTS": 4, "I": mixture.hidden}
    widths = dict.fromkeys(("BLOCK_D", "BLOCK_I"), triton.next_power_of_2(mixture.hidden))
    types |= {"T": "i32", "stride_x": "i32:16"}
    if is_placed:
        types |= {"place_ptr": "*i32:16", "weight_ptr": "*fp32:16"}
    else:
        constexprs |= dict.fromkeys(("place_ptr", "weight_ptr"))
    return Launch("headrace.kernels.moe.outputs:_sum_kernel", types, constexprs | widths, num_warps=8)


def experts_launch(mixture: Mixture, tile: MoeTile, kernel: str) -> Launch:
    is_up = kernel == "_up_kernel"
    pointers = ("x_ptr", "weight_ptr", "hidden_ptr") if is_up else ("hidden_ptr", "weight_ptr", "out_ptr")
    types = {name: "*bf16:16" for name in pointers} | {"order_ptr": "*i32:16", "tiles_ptr": "*i32:16"}
    types |= (
        {"stride_x": "i32:16", "choices": "i32", "x_groups": "i32"}
        if is_up
        else {"hidden_groups": "i32", "scale_ptr": "*fp32:16"}
    )
    constexprs = {"D": mixture.hidden, "INNER": mixture.inner}
    constexprs |= {"ROWS": tile.rows, "COLUMNS": tile.columns if is_up else 2 * tile.columns, "DEPTH": tile.depth}
    constexprs |= {"HAS_GATE": mixture.has_gate} if is_up else {}
    inputs = "x" if is_up else "hidden"
    constexprs |= {"weight_scale_ptr": None, f"{inputs}_scale_ptr": None, **NO_GROUPS}
    return Launch(f"headrace.kernels.moe.experts:{kernel}", types, constexprs, tile.num_warps, tile.num_stages)


def state_rows_launches() -> Iterator[tuple[str, Launch]]:
    """Launches of the kernels that pack states: rows of 128 float32, as in every benchmarks' shape."""
    tile = state_rows.tile_for(128)
    sizes = dict(zip(("D", "WIDTH", "ROWS"), tile, strict=True))
    for values, largest in (("i8", 127), ("fp8e4nv", 448)):
        types = {"x_ptr": "*fp32:16", "values_ptr": f"*{values}:16", "scales_ptr": "*fp32:16", "num_rows": "i32"}
        kernel = "headrace.kernels.transfer.state_rows:_quantise_rows_kernel"
        yield f"quantise {values}", Launch(kernel, types, {"LARGEST_NUMBER": largest} | sizes)
        types = {"values_ptr": f"*{values}:16", "scales_ptr": "*fp32:16", "out_ptr": "*fp32:16", "num_rows": "i32"}
        kernel = "headrace.kernels.transfer.state_rows:_dequantise_rows_kernel"
        yield f"dequantise {values}", Launch(kernel, types, sizes)
