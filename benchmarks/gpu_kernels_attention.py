"""Attention kernels on one GPU: paged prefill, paged decode, and the preparation of queries, keys and values.

    python -m benchmarks.gpu_kernels_attention [--variants] [--only prefill extend decode prepare]
    python -m benchmarks.gpu_kernels_attention --compile-only

Times as in benchmarks/gpu_timing.py; K and V count once. `--variants` adds other tile sizes of decodes, the plain
kernel beside the one by hand, and the library beside ours: torch's FlashAttention over keys and values gathered before
it, gathering included.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks.gpu_kinds import main
from benchmarks.gpu_timing import Row, measure
from benchmarks.shapes import SHAPES
from headrace.kernels.attention.decode import DecodeTile, PagedContexts, decode_tile, num_splits, paged_decode_triton
from headrace.kernels.attention.extend import extend_splits, paged_extend_triton
from headrace.kernels.attention.prefill import PagedChunks, PrefillTile, paged_prefill_triton, prefill_tile
from headrace.kernels.attention.prefill_hopper import HopperTile, fits_hopper, hopper_tile, paged_prefill_hopper
from headrace.kernels.attention.prepare_qkv import prepare_qkv_triton
from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles
from headrace.kernels.lib.hopper import LAYOUT, SPAN, launch_registers, registers
from headrace.models.config import AttentionConfig
from tests.support.kernels.compiled import Launch

BLOCK = 16
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """Sequences of `new` rows behind `cached` tokens, of one model's attention layer."""

    model: str
    num_sequences: int
    new: int
    cached: int

    @property
    def config(self) -> AttentionConfig:
        return SHAPES[self.model].attention

    def __str__(self) -> str:
        return f"{self.model}, {self.num_sequences} x {self.new} behind {self.cached}"

    @property
    def blocks_each(self) -> int:
        return -(-(self.new + self.cached) // BLOCK)

    def block_ids(self) -> list[list[int]]:
        """Scattered."""
        ids = torch.randperm(self.num_sequences * self.blocks_each)
        return ids.view(self.num_sequences, self.blocks_each).tolist()

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, and a layer's pools in a model of four attention layers."""
        c, rows = self.config, self.num_sequences * self.new
        shape = (self.num_sequences * self.blocks_each, 4, 2, BLOCK, c.num_kv_heads, c.head_dim)
        pool = torch.randn(shape, device="cuda", dtype=BF16)
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        projected = torch.randn(rows, width, device="cuda", dtype=BF16)
        q = projected[:, : c.num_heads * c.head_dim].view(rows, c.num_heads, c.head_dim)
        return q, pool[:, 1, 0], pool[:, 1, 1]

    def flops(self) -> float:
        pairs = self.num_sequences * self.new * (self.cached + (self.new + 1) / 2)
        return 4 * pairs * self.config.num_heads * self.config.head_dim

    def num_bytes(self) -> float:
        c = self.config
        rows = self.num_sequences * self.new * 2 * c.num_heads
        return 2.0 * c.head_dim * (rows + self.num_sequences * (self.new + self.cached) * 2 * c.num_kv_heads)


PREFILLS = [
    Workload(model, *shape)
    for model in SHAPES
    for shape in [(1, 2048, 0), (1, 8192, 0), (1, 32768, 0), (16, 4096, 0), (1, 2048, 30720), (8, 16, 4096)]
]
EXTENDS = [  # few rows behind much
    Workload(model, 1, *shape)
    for model in SHAPES
    for shape in [(16, 8176), (64, 8176), (256, 8176), (512, 8176), (16, 32752)]
]
DECODES = [
    Workload(model, *shape)
    for model in SHAPES
    for shape in [(1, 1, 255), (1, 1, 8191), (16, 1, 255), (64, 1, 255), (64, 1, 8191), (256, 1, 255), (256, 1, 2047)]
]
DECODE_VARIANTS = {
    64: [(64, 128, 2, 3), (64, 128, 4, 2), (64, 128, 4, 5), (128, 128, 4, 3), (32, 128, 2, 4), (64, 64, 4, 3),
         (64, 256, 4, 3)],
    256: [(32, 128, 4, 2), (32, 128, 8, 3), (64, 128, 4, 2), (64, 128, 8, 2), (16, 128, 4, 4), (32, 64, 4, 3),
          (32, 256, 4, 3)],
}  # fmt: skip
SPLITS = [1, 2, 8, 16, 32]


def prefill_rows(work: Workload, variants: bool) -> Iterator[Row]:
    N, c, ids = work.num_sequences, work.config, work.block_ids()
    q, k_pool, _ = work.inputs()
    by_hand = fits_hopper(q, k_pool)
    chunks = PagedChunks.build([work.new] * N, [work.cached] * N, ids, BLOCK, q.device)
    if variants or not by_hand:
        plain = partial(paged_prefill_triton, scale=c.scale, chunks=chunks)
        yield row(f"prefill {tuple(prefill_tile(c.head_dim, BF16))}", work, plain)
    if by_hand:
        yield row("prefill by hand", work, partial(paged_prefill_hopper, scale=c.scale, chunks=chunks))
    if variants:
        yield row("gather, FlashAttention", work, flash(work, ids))


def row(name: str, work: Workload, run: Callable[[Tensor, Tensor, Tensor], object]) -> Row:
    return measure(name, str(work), lambda: partial(run, *work.inputs()), work.num_bytes(), work.flops())


def flash(work: Workload, ids: list[list[int]]) -> Callable[[Tensor, Tensor, Tensor], object]:
    """The library: torch's own FlashAttention-2, its causal mask aligned to the last key."""
    N, c, end = work.num_sequences, work.config, work.new + work.cached
    blocks = torch.tensor(ids, device="cuda").flatten()
    rows_N1, keys_N1 = (torch.arange(N + 1, device="cuda", dtype=torch.int32) * each for each in (work.new, end))
    assert end % BLOCK == 0

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> object:
        k, v = (pool.index_select(0, blocks).view(N * end, *pool.shape[2:]) for pool in (k_pool, v_pool))
        return torch.ops.aten._flash_attention_forward(
            q, k, v, rows_N1, keys_N1, work.new, end, 0.0, True, False, scale=c.scale
        )

    return run


def decode_rows(work: Workload, variants: bool) -> Iterator[Row]:
    N, c = work.num_sequences, work.config
    table_tokens = -(-(work.cached + 1) // BLOCK) * BLOCK
    tile = decode_tile(c.head_dim, BF16)
    chosen = num_splits(N, c.num_kv_heads, table_tokens, tile.split_keys)
    choices = [(tile, chosen)]
    if variants:
        choices += [(DecodeTile(*other), chosen) for other in DECODE_VARIANTS[c.head_dim]]
        choices += [(tile, splits) for splits in SPLITS if splits != chosen]
    for tile, splits in choices:
        name = f"decode {tuple(tile)}, {splits} splits"
        yield measure(name, str(work), partial(decode_run, work, tile, splits), work.num_bytes(), work.flops())


def decode_run(work: Workload, tile: DecodeTile, splits: int) -> Callable[[], object]:
    q, k_pool, v_pool = work.inputs()
    contexts = PagedContexts.build([work.cached + 1] * work.num_sequences, work.block_ids(), BLOCK, q.device)
    gate = torch.randn_like(q) if work.config.has_output_gate else None
    return partial(paged_decode_triton, q, k_pool, v_pool, work.config.scale, contexts, gate, tile, splits)


def prepare_row(model: str, count: int) -> Row:
    """Queries, keys, values: read; what changes and what the pool keeps: written."""
    c = Workload(model, 1, count, 0).config
    is_changed = c.has_qk_norm or c.rotary_dim > 0
    heads = 2 * c.num_heads + 5 * c.num_kv_heads if is_changed else 4 * c.num_kv_heads
    return measure("prepare q, k, v", f"{model}, {count} rows", partial(prepare_run, c, count),
                   2.0 * count * heads * c.head_dim)  # fmt: skip


def prepare_run(c: AttentionConfig, count: int) -> Callable[[], object]:
    H, KV, D, R = c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim
    projected = torch.randn(count, (H + 2 * KV) * D, device="cuda", dtype=BF16)
    pool = torch.empty(-(-count // BLOCK), 2, BLOCK, KV, D, device="cuda", dtype=BF16)
    place = torch.arange(count, device="cuda")
    norm = torch.rand(H + KV, D, device="cuda") if c.has_qk_norm else None
    rotary = rotary_angles(place, inverse_frequencies(R, 1e7, place.device)) if R else None
    return partial(
        prepare_qkv_triton, projected, pool[:, 0], pool[:, 1], place // BLOCK, place % BLOCK, H, norm, 1e-6, rotary
    )


def prefills(variants: bool) -> Iterator[Row]:
    for work in PREFILLS:
        yield from prefill_rows(work, variants)


def extends(variants: bool) -> Iterator[Row]:
    """Beside the same prefill with its context in one piece."""
    for work in EXTENDS:
        q, k_pool, _ = work.inputs()
        chunks = PagedChunks.build([work.new], [work.cached], work.block_ids(), BLOCK, q.device)
        whole = paged_prefill_hopper if fits_hopper(q, k_pool) else paged_prefill_triton
        yield row("prefill", work, partial(whole, scale=work.config.scale, chunks=chunks))
        chosen = extend_splits(q, k_pool, chunks)
        for splits in (chosen, *[s for s in (2, 8, 16, 32, 64) if variants and s != chosen]):
            run = partial(paged_extend_triton, scale=work.config.scale, chunks=chunks, splits=splits)
            yield row(f"extend, {splits} splits", work, run)


def decodes(variants: bool) -> Iterator[Row]:
    for work in DECODES:
        yield from decode_rows(work, variants)


def preparations(_variants: bool) -> Iterator[Row]:
    for model in SHAPES:
        for count in (1, 64, 256, 8192):
            yield prepare_row(model, count)


KINDS = {"prefill": prefills, "extend": extends, "decode": decodes, "prepare": preparations}


# ---------------------------------------------------------------- what the compiler makes of them, without a GPU


def compile_checks() -> Iterator[tuple[str, Launch]]:
    """The launches of the shapes above."""
    for model in SHAPES:
        c = Workload(model, 1, 1, 0).config
        H, KV, D, R = c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim
        yield f"prefill {model}", prefill_launch(H, KV, D, prefill_tile(D, BF16))
        yield f"prefill by hand {model}", hopper_launch(H, KV, D, hopper_tile(D))
        yield f"decode {model}", decode_launch(H, KV, D, decode_tile(D, BF16))
        yield f"merge {model}", merge_launch(H, D, decode_tile(D, BF16))
        yield f"prepare {model}", prepare_launch(H, KV, D, R, c.has_qk_norm)
    yield "prefill float32", prefill_launch(8, 2, 256, prefill_tile(256, torch.float32), "fp32")
    yield "decode float32", decode_launch(8, 2, 256, decode_tile(256, torch.float32), "fp32")


def prefill_launch(H: int, KV: int, D: int, tile: PrefillTile, dtype: str = "bf16") -> Launch:
    types = {name: f"*{dtype}:16" for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")}
    types |= {"first_row_ptr": "*i32:16", "start_ptr": "*i32", "table_ptr": "*i32", "num_sequences": "i32"}
    types |= {"stride_q": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16", "stride_table": "i32"}
    group = H // KV
    constexprs = {"H": H, "HKV": KV, "GROUP": group, "PADDED_GROUP": group, "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"TOKENS": tile.rows // group, "KEYS": tile.keys}
    return Launch("headrace.kernels.attention.prefill:_prefill_kernel", types | {"scale_log2": "fp32"}, constexprs,
                  tile.num_warps, tile.num_stages)  # fmt: skip


def hopper_launch(H: int, KV: int, D: int, tile: HopperTile) -> Launch:
    types = {name: "*bf16:16" for name in ("q_ptr", "v_ptr", "out_ptr")}
    types |= {name: f"tensordesc<bf16[{BLOCK},{SPAN.value}],{LAYOUT.value!r}>" for name in ("k_desc", "v_desc")}
    types |= {"first_row_ptr": "*i32:16", "start_ptr": "*i32", "table_ptr": "*i32", "num_sequences": "i32"}
    types |= {"num_items": "i32", "stride_q": "i32:16", "block_rows": "i32", "num_rows": "i32"}
    types |= {"stride_table": "i32", "scale_log2": "fp32"}
    group = H // KV
    constexprs = {"H": H, "HKV": KV, "GROUP": group, "PADDED_GROUP": group, "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"KEYS": tile.keys, "STAGES": tile.stages, "CONSUMERS": tile.consumers}
    constexprs |= dict(zip(("REGISTERS", "PRODUCER_REGISTERS"), registers(tile.consumers), strict=True))
    kernel = "headrace.kernels.attention.prefill_hopper:_hopper_prefill_kernel"
    return Launch(kernel, types, constexprs, 4, 1, launch_registers(tile.consumers))


def decode_launch(H: int, KV: int, D: int, tile: DecodeTile, dtype: str = "bf16") -> Launch:
    types = {name: f"*{dtype}:16" for name in ("q_ptr", "k_ptr", "v_ptr")}
    types |= {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16"}
    types |= {"lens_ptr": "*i32", "table_ptr": "*i32", "stride_table": "i32"}
    types |= {"stride_q": "i32:16", "stride_block": "i32:16", "stride_token": "i32:16", "scale_log2": "fp32"}
    constexprs = {"H": H, "GROUP": H // KV, "ROWS": max(16, H // KV), "D": D, "BLOCK_SIZE": BLOCK}
    constexprs |= {"KEYS": tile.keys, "SPLIT_KEYS": tile.split_keys}
    return Launch(
        "headrace.kernels.attention.decode:_decode_kernel", types, constexprs, tile.num_warps, tile.num_stages
    )


def merge_launch(H: int, D: int, tile: DecodeTile) -> Launch:
    types = {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16", "out_ptr": "*bf16:16", "lens_ptr": "*i32"}
    types |= {"splits": "i32", "gate_ptr": "*bf16:16", "stride_gate": "i32:16"}
    constexprs = {"H": H, "D": D, "KEYS": tile.keys, "SPLIT_KEYS": tile.split_keys}
    return Launch("headrace.kernels.attention.decode:_merge_kernel", types, constexprs)


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


if __name__ == "__main__":
    main(__doc__, KINDS, compile_checks)
