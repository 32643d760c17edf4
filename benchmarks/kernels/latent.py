"""Latent attention on one GPU, at Kimi-Linear's sizes: decodes and prompts over latents, prompts over expanded keys.

    python3 -m benchmarks kernels-latent [--only prefill ...]

A decode's floor counts each latent once and the products with it, a prompt's the products of expanded keys and values,
whichever way is measured; the expansion itself counts as overhead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.latent import LatentHeads, latent_prefill
from headrace.kernels.attention.latent_paged import attend_latents_triton
from headrace.kernels.attention.paged_attention import PagedPrefill

BLOCK, H, R, S, N, V = 16, 32, 512, 64, 128, 128
SCALE = (N + S) ** -0.5
GPU = torch.device("cuda")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=GPU, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """Sequences of `new` rows behind `cached` tokens."""

    num_sequences: int
    new: int
    cached: int

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.new} behind {self.cached}"

    @property
    def rows(self) -> int:
        return self.num_sequences * self.new

    @property
    def pairs(self) -> float:
        return self.rows * (self.cached + (self.new + 1) / 2)

    def block_ids(self) -> list[list[int]]:
        """Scattered blocks of each sequence."""
        each = -(-(self.new + self.cached) // BLOCK)
        return torch.randperm(self.num_sequences * each).view(self.num_sequences, each).tolist()

    def pool(self) -> Tensor:
        """A layer's pool in a model of two such layers."""
        num_blocks = self.num_sequences * -(-(self.new + self.cached) // BLOCK)
        return random(num_blocks, 2, BLOCK, 1, R + S)[:, 1]

    def num_bytes(self, query_size: int, value_size: int) -> float:
        latents = self.num_sequences * (self.new + self.cached) * (R + S)
        return 2.0 * (latents + self.rows * H * (query_size + value_size))


def decodes() -> Iterator[Row]:
    for work in [Work(n, 1, cached) for n in (1, 16, 64) for cached in (255, 8191)] + [Work(1, 1, 131071)]:
        contexts = PagedContexts.build([work.cached + 1] * work.rows, work.block_ids(), BLOCK, GPU)

        def prepare(work: Work = work, contexts: PagedContexts = contexts) -> partial[Tensor]:
            return partial(attend_latents_triton, random(work.rows, H, R + S), work.pool(), R, SCALE, contexts)

        flops = 2 * work.pairs * H * (2 * R + S)
        yield measure("decode", str(work), prepare, work.num_bytes(R + S, R), flops)


def prefills() -> Iterator[Row]:
    heads = LatentHeads(random(H, N, R) * R**-0.5, random(H, V, R) * R**-0.5)
    for work in [Work(1, 512, 0), Work(1, 1024, 7168), Work(1, 8192, 0), Work(16, 4096, 0), Work(8, 16, 4096)]:
        lengths, starts = [work.new] * work.num_sequences, [work.cached] * work.num_sequences
        paged = PagedPrefill.build(lengths, starts, work.block_ids(), BLOCK, GPU)
        captured = PagedPrefill(paged.lengths, paged.chunks)
        for name, batch in (("latents", captured), ("expanded", paged)):
            if name == "expanded" and work.new < 512:
                continue

            def prepare(work: Work = work, batch: PagedPrefill = batch) -> partial[Tensor]:
                q, own = random(work.rows, H, N + S), random(work.rows, R + S)
                return partial(latent_prefill, q, own, work.pool(), heads, SCALE, batch)

            flops = 2 * work.pairs * H * (N + S + V)
            yield measure(f"prefill, {name}", str(work), prepare, work.num_bytes(N + S, V), flops)


main = kernel_command({"prefill": prefills, "decode": decodes}, "Latent attention: decodes and prompts.")
