"""Attention kernels on one GPU: paged prefill, and paged decode with and without drafts. K and V count once.

python3 -m benchmarks kernels-attention [--only prefill ...]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.shapes import MOE_SHAPES, SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.attention.decode import PagedContexts, paged_decode_triton
from headrace.kernels.attention.prefill import PagedChunks, paged_prefill_triton
from headrace.kernels.attention.prefill_hopper import fits_hopper, paged_prefill_hopper
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
        return (SHAPES | MOE_SHAPES)[self.model].attention

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
    for model in (*SHAPES, "nemotron-3-nano-30b-a3b")  # heads of 64, 256 and 128
    for shape in [(1, 2048, 0), (1, 8192, 0), (1, 32768, 0), (16, 4096, 0), (1, 2048, 30720), (8, 16, 4096)]
]
DECODES = [
    Workload(model, *shape)
    for model in SHAPES
    for shape in [(1, 1, 255), (1, 1, 8191), (16, 1, 255), (64, 1, 255), (64, 1, 8191), (256, 1, 255), (256, 1, 2047)]
]
CHECKS = [
    Workload(model, *shape) for model in SHAPES for shape in [(1, 4, 8188), (16, 4, 20476), (64, 4, 252), (64, 4, 8188)]
]


def row(name: str, work: Workload, run: Callable[[Tensor, Tensor, Tensor], object]) -> Row:
    return measure(name, str(work), lambda: partial(run, *work.inputs()), work.num_bytes(), work.flops())


def decodes(name: str, workloads: Sequence[Workload]) -> Iterator[Row]:
    for work in workloads:
        c, N, T = work.config, work.num_sequences, work.new
        table = PagedContexts.build([work.cached + T] * N, work.block_ids(), BLOCK, torch.device("cuda")).table_NM
        lens = torch.arange(work.cached + 1, work.cached + T + 1, dtype=torch.int32, device="cuda")
        contexts = PagedContexts(lens.repeat(N), table)
        gate = torch.randn(N * T, c.num_heads, c.head_dim, device="cuda", dtype=BF16)
        run = partial(paged_decode_triton, scale=c.scale, contexts=contexts, gate=gate if c.has_output_gate else None)
        yield row(name, work, run)


MIXES = {
    "63 x 500 and 1 x 30,000 tokens": [500] * 63 + [30_000],
    "64 x 250 to 12,000 tokens": [400, 900, 1500, 3000, 6000, 700, 12_000, 250] * 8,
}


def mixed() -> Iterator[Row]:
    """Decodes of contexts of unlike lengths."""
    for model in SHAPES:
        c = SHAPES[model].attention
        for name, lens in MIXES.items():
            counts = [-(-length // BLOCK) for length in lens]
            ids = iter(torch.randperm(sum(counts)).tolist())
            blocks = [[next(ids) for _ in range(count)] for count in counts]
            contexts = PagedContexts.build(lens, blocks, BLOCK, torch.device("cuda"))
            shape = (sum(counts), 4, 2, BLOCK, c.num_kv_heads, c.head_dim)  # of a model of four attention layers

            def prepare(
                c: AttentionConfig = c, contexts: PagedContexts = contexts, shape: tuple[int, ...] = shape
            ) -> partial[Tensor]:
                pool = torch.randn(shape, device="cuda", dtype=BF16)
                q, gate = (torch.randn(64, c.num_heads, c.head_dim, device="cuda", dtype=BF16) for _ in range(2))
                return partial(
                    paged_decode_triton, q, pool[:, 1, 0], pool[:, 1, 1], c.scale, contexts,
                    gate if c.has_output_gate else None,
                )  # fmt: skip

            num_bytes = 4.0 * c.head_dim * (64 * c.num_heads + sum(lens) * c.num_kv_heads)
            yield measure("decode", f"{model}, {name}", prepare, num_bytes, 4.0 * sum(lens) * c.num_heads * c.head_dim)


def prefills() -> Iterator[Row]:
    for work in PREFILLS:
        N, c, ids = work.num_sequences, work.config, work.block_ids()
        q, k_pool, _ = work.inputs()
        chunks = PagedChunks.build([work.new] * N, [work.cached] * N, ids, BLOCK, q.device)
        yield row("prefill, Triton", work, partial(paged_prefill_triton, scale=c.scale, chunks=chunks))
        if fits_hopper(q, k_pool):
            yield row("prefill, Hopper", work, partial(paged_prefill_hopper, scale=c.scale, chunks=chunks))


KERNELS: dict[str, Callable[[], Iterator[Row]]] = {
    "prefill": prefills,
    "decode": partial(decodes, "decode", DECODES),
    "mixed": mixed,
    "drafts": partial(decodes, "decode with 3 drafts", CHECKS),
}
main = kernel_command(KERNELS, "Attention kernels: paged prefill, and paged decode with and without drafts.")
