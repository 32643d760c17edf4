"""Sequences in a paged pool whose unused memory is NaN, for the tests of attention's Triton kernels."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention.prefill import PagedChunks, paged_prefill_triton
from headrace.kernels.lib.sizes import cdiv
from tests.kernels.naive import NAN, naive_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: too large for the interpreter")
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}


class Paged:
    """Sequences in scattered blocks of one layer of a pool; everything else is NaN."""

    def __init__(self, ends: list[int], H: int, KV: int, D: int, dtype: torch.dtype = torch.float32):
        self.H, self.KV, self.D, self.dtype = H, KV, D, dtype
        counts = [cdiv(end, BLOCK) for end in ends]
        pool = torch.full((sum(counts) + 3, 3, 2, BLOCK, KV, D), NAN, dtype=dtype, device=DEVICE)
        self.k_pool, self.v_pool = pool[:, 1, 0], pool[:, 1, 1]
        free = torch.randperm(len(pool)).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in counts]
        self.free = free
        self.k, self.v = ([self.random(end, KV, D) for end in ends] for _ in range(2))
        for i, end in enumerate(ends):
            for first, block in zip(range(0, end, BLOCK), self.blocks[i], strict=True):
                held = slice(first, min(first + BLOCK, end))
                self.k_pool[block, : held.stop - first] = self.k[i][held]
                self.v_pool[block, : held.stop - first] = self.v[i][held]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def queries(self, rows: int) -> Tensor:
        """A slice of a projection, as the engine passes it."""
        return self.random(rows, (self.H + 2) * self.D)[:, : self.H * self.D].view(rows, self.H, self.D)

    def check(self, out: Tensor, q: Tensor, sequence: int, scale: float) -> None:
        expected = naive_attention(q, self.k[sequence], self.v[sequence], scale)
        torch.testing.assert_close(out.double(), expected, atol=BOUND[self.dtype], rtol=BOUND[self.dtype])


def check_prefill(
    spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype, prefill=paged_prefill_triton
) -> None:
    paged = Paged([end for _, end in spans], H, KV, D, dtype)
    lengths, starts = [end - start for start, end in spans], [start for start, _ in spans]
    q = paged.queries(sum(lengths))
    chunks = PagedChunks.build(lengths, starts, paged.blocks, BLOCK, DEVICE)
    out = prefill(q, paged.k_pool, paged.v_pool, D**-0.5, chunks)
    assert out.dtype == dtype
    for i, (part, rows) in enumerate(zip(out.split(lengths), q.split(lengths), strict=True)):
        if len(rows):
            paged.check(part, rows, i, D**-0.5)
