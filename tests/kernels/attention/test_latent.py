"""Latent attention: expanded and absorbed against attention with each head's own keys and values, in float64."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention import latent
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.latent import (
    LatentHeads,
    latent_decode,
    latent_prefill,
    store_latents_torch,
    store_latents_triton,
)
from headrace.kernels.attention.latent_paged import attend_latents_triton, keys_of_split, latent_tile
from headrace.kernels.attention.paged_attention import DenseChunks, DenseContexts, PagedDecode, PagedPrefill
from headrace.kernels.attention.prefill import PagedChunks
from tests.kernels.attention.paged import BLOCK, BOUND, DEVICE, needs_gpu
from tests.kernels.naive import NAN, naive_attention
from tests.support.kernels.compiled import Launch, compile_for_h200

SCALE = 0.17


class Latents:
    """Sequences in scattered blocks of one layer of a pool; everything else is NaN. Keys of 24 + S, values of 20."""

    def __init__(self, ends: list[int], H: int, R: int, S: int, dtype: torch.dtype = torch.float32):
        self.H, self.R, self.S, self.dtype, self.ends = H, R, S, dtype, ends
        counts = [-(-end // BLOCK) for end in ends]
        self.pool = torch.full((sum(counts) + 2, 2, BLOCK, 1, R + S), NAN, dtype=dtype, device=DEVICE)[:, 1]
        free = torch.randperm(len(self.pool)).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in counts]
        self.latents = [self.random(end, R + S) for end in ends]
        self.heads = LatentHeads(self.random(H, 24, R) * R**-0.5, self.random(H, 20, R) * R**-0.5)
        for blocks, latents in zip(self.blocks, self.latents, strict=True):
            at = torch.arange(len(latents), device=DEVICE)
            self.pool[torch.tensor(blocks, device=DEVICE)[at // BLOCK], at % BLOCK] = latents[:, None]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def queries(self, rows: int) -> Tensor:
        """A slice of a projection, as the engine passes it."""
        return self.random(rows, self.H * (24 + self.S) + 8)[:, :-8].unflatten(1, (self.H, -1))

    def expected(self, q: Tensor, sequence: int) -> Tensor:
        latents = self.latents[sequence].double()
        keys = torch.einsum("hnr,tr->thn", self.heads.key_HNR.double(), latents[:, : self.R])
        shared = latents[:, None, self.R :].expand(-1, self.H, -1)
        values = torch.einsum("hvr,tr->thv", self.heads.value_HVR.double(), latents[:, : self.R])
        return naive_attention(q, torch.cat((keys, shared), -1), values, SCALE)

    def check(self, out: Tensor, q: Tensor, lengths: list[int]) -> None:
        assert out.dtype == self.dtype and out.shape == (len(q), self.H, 20)
        bound = BOUND[self.dtype]
        for i, (part, rows) in enumerate(zip(out.split(lengths), q.split(lengths), strict=True)):
            torch.testing.assert_close(part.double(), self.expected(rows, i), atol=bound, rtol=bound)


@pytest.mark.parametrize("store", [store_latents_torch, store_latents_triton])
def test_compressed_parts_are_normed_on_their_way_to_the_pool(store):
    latents = torch.randn(5, 45, device=DEVICE)[:, 9:]  # of a projection's rows
    norm, before = torch.rand(24, device=DEVICE), latents.clone()
    pool = torch.full((4, 2, BLOCK, 1, 36), NAN, device=DEVICE)[:, 1]
    blocks, offsets = torch.tensor([3, 3, 0, 1, 1], device=DEVICE), torch.tensor([4, 5, 15, 0, 1], device=DEVICE)
    store(latents, norm, 1e-3, pool, blocks, offsets)
    compressed = before[:, :24].double()
    normed = compressed * (compressed.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm
    expected = torch.cat((normed.float(), before[:, 24:]), -1)
    torch.testing.assert_close(latents, expected)
    assert torch.equal(pool[blocks, offsets, 0], latents)
    assert pool.isfinite().sum() == 5 * 36


SPANS = [(0, 37), (16, 17), (20, 70), (64, 80)]
LENGTHS, STARTS = [end - start for start, end in SPANS], [start for start, _ in SPANS]


def test_prompts_expand_the_latents_of_their_context():
    latents = Latents([end for _, end in SPANS], H=3, R=24, S=8)
    q = latents.queries(sum(LENGTHS))
    own = torch.cat([each[start:] for each, start in zip(latents.latents, STARTS, strict=True)])
    chunks = DenseChunks.build(LENGTHS, STARTS, latents.blocks, BLOCK, DEVICE)
    batch = PagedPrefill(tuple(LENGTHS), chunks, tuple(STARTS))
    latents.check(latent_prefill(q, own, latents.pool, latents.heads, SCALE, batch), q, LENGTHS)


@pytest.mark.parametrize("values_at_once", [1 << 28, 1000], ids=["all heads at once", "a head at a time"])
def test_long_prompts_expand_them_on_a_gpu_too(values_at_once: int, monkeypatch):
    monkeypatch.setattr(latent, "EXPANDED_VALUES", values_at_once)
    monkeypatch.setattr(latent, "EXPANDED_ROWS", 8)
    latents = Latents([end for _, end in SPANS], H=3, R=24, S=8)
    q = latents.queries(sum(LENGTHS))
    own = torch.cat([each[start:] for each, start in zip(latents.latents, STARTS, strict=True)])
    chunks = PagedChunks.build(LENGTHS, STARTS, latents.blocks, BLOCK, DEVICE)
    batch = PagedPrefill(tuple(LENGTHS), chunks, tuple(STARTS))
    latents.check(latent_prefill(q, own, latents.pool, latents.heads, SCALE, batch), q, LENGTHS)


def test_decodes_attend_to_latents_themselves():
    latents = Latents([1, 16, 40], H=3, R=24, S=8)
    q = latents.queries(3)
    contexts = DenseContexts.build([1, 16, 40], latents.blocks, BLOCK, DEVICE)
    latents.check(latent_decode(q, latents.pool, latents.heads, SCALE, PagedDecode(3, contexts)), q, [1, 1, 1])


@pytest.mark.parametrize("programs", [None, 1, 4])
def test_decodes_in_triton(programs: int | None):
    ends = [1, 16, 150]
    latents = Latents(ends, H=3, R=32, S=16)
    q = latents.queries(4)
    contexts = PagedContexts.build([*ends, 0], [*latents.blocks, []], BLOCK, DEVICE)
    attended = attend_latents_triton(latents.heads.absorbed(q), latents.pool, 32, SCALE, contexts, programs)
    latents.check(latents.heads.values(attended[:3]), q[:3], [1, 1, 1])
    assert not attended[3].any()  # padding


@pytest.mark.parametrize(("T", "programs"), [(2, 1), (3, 4), (4, None)])
def test_rows_of_a_sequence_in_triton(T: int, programs: int | None):
    """Each sees the tokens up to its own; one sequence has rows of padding."""
    ends, H = [T, 16, 130], 3
    latents = Latents(ends, H=H, R=32, S=16)
    q = latents.queries(3 * T)
    lens = torch.tensor([[end - T + 1 + i for i in range(T)] for end in ends], dtype=torch.int32, device=DEVICE)
    table = PagedContexts.build(ends, latents.blocks, BLOCK, DEVICE).table_NM
    lens[1, -1] = 0
    contexts = PagedContexts(lens.view(-1), table)
    attended = attend_latents_triton(latents.heads.absorbed(q), latents.pool, 32, SCALE, contexts, programs)
    assert not attended[2 * T - 1].any()
    values, bound = latents.heads.values(attended).double().view(3, T, H, 20), BOUND[torch.float32]
    expected = torch.stack([latents.expected(rows, i) for i, rows in enumerate(q.split(T))])
    values[1, -1] = expected[1, -1]
    torch.testing.assert_close(values, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("splits", [None, 2])
def test_prompts_in_triton(splits: int | None):
    check_prompts([(0, 17), (16, 17), (30, 50)], H=3, R=32, S=16, dtype=torch.float32, splits=splits)


def test_bfloat16_in_triton():
    check_prompts([(0, 20), (30, 33)], H=3, R=32, S=16, dtype=torch.bfloat16, splits=2)


def check_prompts(spans: list[tuple[int, int]], H: int, R: int, S: int, dtype: torch.dtype, splits: int | None) -> None:
    latents = Latents([end for _, end in spans], H, R, S, dtype)
    lengths = [end - start for start, end in spans]
    q = latents.queries(sum(lengths))
    chunks = PagedChunks.build(lengths, [start for start, _ in spans], latents.blocks, BLOCK, DEVICE)
    attended = attend_latents_triton(latents.heads.absorbed(q), latents.pool, R, SCALE, chunks, splits)
    latents.check(latents.heads.values(attended), q, lengths)


@triton.jit
def _split_kernel(out_ptr, length, splits, least_steps, KEYS: tl.constexpr):
    tl.store(out_ptr, keys_of_split(length, splits, least_steps, KEYS))


@pytest.mark.parametrize(
    ("length", "splits", "keys"), [(8192, 64, 256), (8192, 16, 512), (8193, 16, 544), (100, 4, 256), (131072, 64, 2048)]
)
def test_splits_are_short_while_contexts_are(length: int, splits: int, keys: int):
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _split_kernel[(1,)](out, length, splits, 8, KEYS=32)
    assert out.item() == keys


@needs_gpu
@pytest.mark.parametrize("T", [1, 3])
def test_decodes_of_real_sizes_on_the_gpu(T: int):
    ends = [T, 16, 5000, 700, 8200, 64] * 3
    latents = Latents(ends, H=32, R=512, S=64, dtype=torch.bfloat16)
    q = latents.queries(len(ends) * T)
    lens = torch.tensor([end - T + 1 + i for end in ends for i in range(T)], dtype=torch.int32, device=DEVICE)
    contexts = PagedContexts(lens, PagedContexts.build(ends, latents.blocks, BLOCK, DEVICE).table_NM)
    attended = attend_latents_triton(latents.heads.absorbed(q), latents.pool, 512, SCALE, contexts)
    latents.check(latents.heads.values(attended), q, [T] * len(ends))


@needs_gpu
@pytest.mark.parametrize("spans", [[(0, 700), (16, 17), (4000, 4600)], [(9000, 9010)]])
def test_real_sizes_on_the_gpu(spans: list[tuple[int, int]]):
    check_prompts(spans, H=32, R=512, S=64, dtype=torch.bfloat16, splits=None)


def test_sizes_that_a_gpu_does_not_take_are_refused_by_number():
    latents = Latents([5], H=3, R=24, S=8)
    contexts = PagedContexts.build([5], latents.blocks, BLOCK, DEVICE)
    with pytest.raises(ValueError, match="latents of 24 and 8 values: a GPU takes powers of two"):
        attend_latents_triton(latents.heads.absorbed(latents.queries(1)), latents.pool, 24, SCALE, contexts)


@pytest.mark.slow
def test_the_kernels_of_kimis_sizes_compile_for_an_h200():
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "pool")} | {"part_ptr": "*fp32:16", "log_sum_ptr": "*fp32:16"}
    types |= {"table_ptr": "*i32", "stride_table": "i32", "scale_log2": "fp32"}
    types |= {f"stride_{name}": "i32:16" for name in ("q", "block", "token")}
    decode = types | {"lens_ptr": "*i32", "num_tiles": "i32", "least_steps": "i32"}
    chunks = types | {"first_row_ptr": "*i32", "start_ptr": "*i32", "num_sequences": "i32"}
    launches = []
    for kernel, kinds, tokens, more in (
        ("_latent_decode_kernel", decode, 1, {"T": 1}),
        ("_latent_decode_kernel", decode, 2, {"T": 4}),
        ("_latent_prompts_kernel", chunks, 2, {}),
    ):
        tile = latent_tile(torch.bfloat16, tokens * 32)
        sizes = more | {"H": 32, "HEADS": 32, "R": 512, "S": 64, "BLOCK_SIZE": 16, "TOKENS": tokens, "KEYS": tile.keys}
        if kernel == "_latent_prompts_kernel":
            sizes |= {"LEAST_STEPS": tile.least_steps}
        path = f"headrace.kernels.attention.latent_paged:{kernel}"
        launches.append(Launch(path, kinds, sizes, tile.num_warps, tile.num_stages))
    plain, drafts, prompts = compile_for_h200(launches)
    # 64 rows of 512 sums leave a thread too few registers for all else: 34 of them, read once a step, are not there.
    assert plain.stack_bytes == 0 and drafts.stack_bytes <= 136 and prompts.stack_bytes <= 128
    assert all(report.shared_bytes <= 227 * 1024 for report in (plain, drafts, prompts))
