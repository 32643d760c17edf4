"""Attention kernels on one GPU: paged prefill, paged decode, and the preparation of queries, keys and values.

    python3 -m benchmarks kernels-attention [--library] [--only prefill ...]

K and V count once. `--library` adds torch's FlashAttention over keys and values gathered before it, gathering included.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.attention.decode import PagedContexts, paged_decode_triton
from headrace.kernels.attention.extend import extend_splits, paged_extend_triton
from headrace.kernels.attention.prefill import PagedChunks, paged_prefill_triton
from headrace.kernels.attention.prefill_hopper import fits_hopper, paged_prefill_hopper
from headrace.kernels.attention.prepare_qkv import prepare_qkv_triton
from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles
from headrace.models.config import AttentionConfig

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
        """Scattered blocks of each sequence."""
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


def decode_row(work: Workload) -> Row:
    c = work.config
    contexts = PagedContexts.build(
        [work.cached + 1] * work.num_sequences, work.block_ids(), BLOCK, torch.device("cuda")
    )
    gate = torch.randn(work.num_sequences, c.num_heads, c.head_dim, device="cuda", dtype=BF16)
    run = partial(paged_decode_triton, scale=c.scale, contexts=contexts, gate=gate if c.has_output_gate else None)
    return row("decode", work, run)


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


def prefills(library: bool) -> Iterator[Row]:
    for work in PREFILLS:
        N, c, ids = work.num_sequences, work.config, work.block_ids()
        q, k_pool, _ = work.inputs()
        chunks = PagedChunks.build([work.new] * N, [work.cached] * N, ids, BLOCK, q.device)
        yield row("prefill, Triton", work, partial(paged_prefill_triton, scale=c.scale, chunks=chunks))
        if fits_hopper(q, k_pool):
            yield row("prefill, Hopper", work, partial(paged_prefill_hopper, scale=c.scale, chunks=chunks))
        if library:
            yield row("gather, FlashAttention", work, flash(work, ids))


def extends(library: bool) -> Iterator[Row]:
    """Few rows behind a long context, beside the same prefill with its context in one piece."""
    for work in EXTENDS:
        q, k_pool, _ = work.inputs()
        chunks = PagedChunks.build([work.new], [work.cached], work.block_ids(), BLOCK, q.device)
        whole = paged_prefill_hopper if fits_hopper(q, k_pool) else paged_prefill_triton
        yield row("prefill", work, partial(whole, scale=work.config.scale, chunks=chunks))
        splits = extend_splits(q, k_pool, chunks)
        run = partial(paged_extend_triton, scale=work.config.scale, chunks=chunks, splits=splits)
        yield row(f"extend, {splits} splits", work, run)


def decodes(library: bool) -> Iterator[Row]:
    for work in DECODES:
        yield decode_row(work)


def preparations(library: bool) -> Iterator[Row]:
    for model in SHAPES:
        for count in (1, 64, 256, 8192):
            yield prepare_row(model, count)


KINDS = {"prefill": prefills, "extend": extends, "decode": decodes, "prepare": preparations}
main = kernel_command(
    KINDS, "Attention kernels: paged prefill and decode, the preparation of queries, keys and values."
)
