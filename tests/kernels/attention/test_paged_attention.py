"""Paged attention against dense float64 attention, over pools that are NaN where nothing is stored."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention import paged_attention
from headrace.kernels.attention.paged_attention import (
    DenseContexts,
    PagedDecode,
    PagedPrefill,
    paged_decode,
    paged_prefill,
    store_kv,
)
from headrace.kernels.lib.sizes import cdiv
from tests.kernels.naive import NAN, naive_attention

CPU = torch.device("cpu")
H, KV, D, BLOCK, NUM_BLOCKS, SCALE = 6, 2, 8, 16, 64, 0.3
FEW_TOKENS = 100


class Paged:
    """Sequences of given lengths in scattered blocks; everything else in the pool is NaN."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        pool = torch.full((NUM_BLOCKS, 3, 2, BLOCK, KV, D), NAN)
        self.k_pool, self.v_pool = pool[:, 1, 0], pool[:, 1, 1]
        free = torch.randperm(NUM_BLOCKS).tolist()
        self.blocks = [[free.pop() for _ in range(cdiv(n, BLOCK))] for n in lengths]
        self.q = [torch.randn(n, H, D) for n in lengths]
        self.k = [torch.randn(n, KV, D) for n in lengths]
        self.v = [torch.randn(n, KV, D) for n in lengths]

    def store(self, sequence: int, start: int, end: int) -> None:
        places = range(start, end)
        block = torch.tensor([self.blocks[sequence][p // BLOCK] for p in places])
        offset = torch.tensor([p % BLOCK for p in places])
        k, v = self.k[sequence][start:end], self.v[sequence][start:end]
        store_kv(k, v, self.k_pool, self.v_pool, block, offset)

    def expected(self, sequence: int, start: int) -> Tensor:
        return naive_attention(self.q[sequence][start:], self.k[sequence], self.v[sequence], SCALE)


@pytest.mark.parametrize(
    "spans",
    [[(0, 1)], [(0, 16)], [(0, 65)], [(16, 63)], [(17, 18)], [(5, 64)], [(0, 40), (33, 65), (0, 1), (64, 80)]],
    ids=str,
)
def test_prefill_sees_its_prefix_and_itself(spans: list[tuple[int, int]]):
    paged = Paged([end for _, end in spans])
    for i, (_, end) in enumerate(spans):
        paged.store(i, 0, end)
    rows = [slice(start, end) for start, end in spans]
    q, k, v = (torch.cat([t[r] for t, r in zip(ts, rows, strict=True)]) for ts in (paged.q, paged.k, paged.v))
    lengths, starts = [end - start for start, end in spans], [start for start, _ in spans]
    batch = PagedPrefill.build(lengths, starts, paged.blocks, BLOCK, CPU)

    out = paged_prefill(q, k, v, paged.k_pool, paged.v_pool, SCALE, batch)

    for i, part in enumerate(out.split(lengths)):
        torch.testing.assert_close(part.double(), paged.expected(i, starts[i]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[1], [16], [17], [5, 64, 1, 33], [20, 20, 20]], ids=str)
def test_decode_sees_exactly_its_own_context(lengths: list[int]):
    paged = Paged(lengths)
    for i, n in enumerate(lengths):
        paged.store(i, 0, n)
    q = torch.stack([q[-1] for q in paged.q])

    out = paged_decode(q, paged.k_pool, paged.v_pool, SCALE, PagedDecode.build(lengths, paged.blocks, BLOCK, CPU))

    for i, n in enumerate(lengths):
        torch.testing.assert_close(out[i : i + 1].double(), paged.expected(i, n - 1), atol=1e-5, rtol=0)


def test_a_long_context_is_not_gathered_beside_short_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged_attention, "GATHERED_TOKENS", FEW_TOKENS)
    lengths = [40, 5, 300, 1, 33, 20]
    paged = Paged(lengths)
    for i, n in enumerate(lengths):
        paged.store(i, 0, n)
    q = torch.stack([q[-1] for q in paged.q])
    batch = PagedDecode.build(lengths, paged.blocks, BLOCK, CPU)
    assert isinstance(batch.contexts, DenseContexts)
    assert [group.sequences_N.tolist() for group in batch.contexts.groups] == [[1, 3, 5], [0, 4], [2]]

    out = paged_decode(q, paged.k_pool, paged.v_pool, SCALE, batch)

    for i, n in enumerate(lengths):
        torch.testing.assert_close(out[i : i + 1].double(), paged.expected(i, n - 1), atol=1e-5, rtol=0)


def test_decode_closes_its_output_gate():
    paged = Paged([20])
    paged.store(0, 0, 20)
    gate, batch = torch.randn(1, H, D), PagedDecode.build([20], paged.blocks, BLOCK, CPU)
    out = paged_decode(paged.q[0][-1:], paged.k_pool, paged.v_pool, SCALE, batch, gate)
    torch.testing.assert_close(out.double(), paged.expected(0, 19) * gate.double().sigmoid(), atol=1e-5, rtol=0)


def test_blocks_beyond_the_context_are_not_read():
    paged = Paged([20])
    paged.store(0, 0, 20)
    reserved_ahead = [[*paged.blocks[0], 0, 1, 2]]
    batch = PagedDecode.build([20], reserved_ahead, BLOCK, CPU)
    out = paged_decode(paged.q[0][-1:], paged.k_pool, paged.v_pool, SCALE, batch)
    torch.testing.assert_close(out.double(), paged.expected(0, 19), atol=1e-5, rtol=0)


def test_store_touches_only_the_named_places():
    paged = Paged([40])
    before = paged.k_pool.clone()
    paged.store(0, 15, 18)
    changed = (paged.k_pool != before) & ~torch.isnan(paged.k_pool)
    first, second = paged.blocks[0][:2]
    expected = torch.zeros(NUM_BLOCKS, BLOCK, dtype=torch.bool)
    expected[first, 15] = expected[second, 0] = expected[second, 1] = True
    assert torch.equal(changed.all(-1).all(-1), expected)


def test_keys_of_another_dtype_are_refused():
    paged = Paged([4])
    index = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not fit the pool"):
        store_kv(paged.k[0].half(), paged.v[0].half(), paged.k_pool, paged.v_pool, index, index)
