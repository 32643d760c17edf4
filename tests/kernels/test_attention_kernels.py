"""The Triton kernels of attention against float64, on a GPU or in the interpreter; pools are NaN where nothing lies."""

from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention import paged_attention
from headrace.kernels.attention.decode import DecodeTile, PagedContexts, num_splits, paged_decode_triton
from headrace.kernels.attention.paged_attention import PagedPrefill, paged_prefill
from headrace.kernels.attention.prefill import PagedChunks, PrefillTile, paged_prefill_triton
from headrace.kernels.attention.prefill_hopper import fits_hopper
from headrace.kernels.attention.prepare_qkv import prepare_qkv_torch, prepare_qkv_triton
from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles, rotary_angles_triton
from headrace.kernels.lib.sizes import cdiv
from tests.kernels.naive import NAN, naive_attention
from tests.support.kernels.compiled import compile_for_h200

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
        paged.check(part, rows, i, D**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(0, 33)], [(17, 18)], [(5, 40)], [(0, 20), (33, 50), (0, 1), (31, 48)]], ids=str
)
def test_prefill_sees_its_prefix_and_itself(spans: list[tuple[int, int]], dtype: torch.dtype):
    check_prefill(spans, 4, 2, 16, dtype, partial(paged_prefill_triton, tile=PrefillTile(32, 32, 4, 2)))


@pytest.mark.parametrize(("H", "KV"), [(3, 1), (2, 2), (8, 1)])
def test_prefill_groups_any_number_of_query_heads(H: int, KV: int):
    check_prefill([(7, 30)], H, KV, 16, torch.float32)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256)])
@pytest.mark.parametrize(
    "spans", [[(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100)], [(0, 600)], [(500, 564)]], ids=str
)
def test_prefill_of_real_shapes(spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype):
    check_prefill(spans, H, KV, D, dtype)


AWKWARD_SPANS = [
    [(0, 1)],
    [(0, 64)],
    [(63, 65)],
    [(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100), (127, 128), (5, 70)],
    [(0, 1500)],
    [(5000, 5200), (0, 5000)],
]


def needs_hopper(H: int, KV: int, D: int, dtype: torch.dtype) -> None:
    if not fits_hopper(torch.empty(1, H, D, dtype=dtype, device=DEVICE), torch.empty(1, BLOCK, KV, D)):
        pytest.skip("not a Hopper GPU")


@needs_gpu
@pytest.mark.parametrize(
    ("H", "KV", "D", "dtype"),
    [
        (32, 8, 64, torch.bfloat16),
        (3, 1, 64, torch.bfloat16),
        (2, 2, 64, torch.float16),
        (16, 4, 256, torch.bfloat16),
        (8, 1, 256, torch.bfloat16),
        (2, 2, 256, torch.float16),
    ],
)
@pytest.mark.parametrize("spans", AWKWARD_SPANS, ids=str)
def test_prefill_by_hand(spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype, monkeypatch):
    """As the engine calls it: `paged_prefill` chooses it for heads of 64 and of 256."""
    needs_hopper(H, KV, D, dtype)
    monkeypatch.delattr(paged_attention, "paged_prefill_triton")
    monkeypatch.setattr(paged_attention, "extend_splits", lambda q, k_pool, chunks: 1)
    lengths = tuple(end - start for start, end in spans)

    def prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chunks: PagedChunks) -> Tensor:
        unread = q.new_full((len(q), KV, D), NAN)
        return paged_prefill(q, unread, unread, k_pool, v_pool, scale, PagedPrefill(lengths, chunks))

    check_prefill(spans, H, KV, D, dtype, prefill)


def test_heads_that_the_kernel_by_hand_was_not_measured_for_do_not_fit_it():
    assert not fits_hopper(torch.empty(1, 12, 128, dtype=torch.bfloat16, device=DEVICE), torch.empty(1, BLOCK, 4, 128))
    assert not fits_hopper(torch.empty(1, 16, 256, device=DEVICE), torch.empty(1, BLOCK, 4, 256))  # float32


def test_an_empty_prefill_is_none():
    paged = Paged([1], 2, 1, 16)
    chunks = PagedChunks.build([], [], [], BLOCK, DEVICE)
    assert paged_prefill_triton(paged.queries(0), paged.k_pool, paged.v_pool, 1.0, chunks).shape == (0, 2, 16)


def check_decode(
    lens: list[int],
    H: int,
    KV: int,
    D: int,
    dtype: torch.dtype,
    splits: int | None,
    has_gate: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    paged = Paged(lens, H, KV, D, dtype)
    q = paged.queries(len(lens))
    reserved = [[*blocks, paged.free[0]] for blocks in paged.blocks]  # blocks behind the context are not read
    contexts = PagedContexts.build(lens, reserved, BLOCK, DEVICE)
    wide = torch.full((len(lens), contexts.table_NM.shape[1] + 5), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, :-5] = contexts.table_NM  # a captured graph's table is wider than any context
    contexts = PagedContexts(contexts.lens_N, wide)
    gate = paged.queries(len(lens)) if has_gate else None
    out = paged_decode_triton(q, paged.k_pool, paged.v_pool, D**-0.5, contexts, gate, tile, splits)
    if gate is not None:  # open again, to compare; what a closed gate holds back is not far from rounding
        out = (out.double() / gate.double().sigmoid()).to(dtype)
    for i, length in enumerate(lens):
        if length:
            paged.check(out[i : i + 1], q[i : i + 1], i, D**-0.5)
        else:
            assert not out[i].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("lens", [[1], [129], [5, 300, 0, 64]], ids=str)
def test_decode_sees_exactly_its_own_context(lens: list[int], splits: int, dtype: torch.dtype):
    check_decode(lens, 6, 2, 16, dtype, splits)


def test_decode_merges_more_splits_than_at_once():
    tile = DecodeTile(keys=16, split_keys=16, num_warps=4, num_stages=1)
    check_decode([16 * 40], 1, 1, 16, torch.float32, 64, tile=tile)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_closes_its_output_gate(splits: int):
    check_decode([5, 300, 0, 64], 6, 2, 16, torch.float32, splits, has_gate=True)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256)])
@pytest.mark.parametrize("lens", [[8192], [1, 63, 64, 65, 5000, 127, 128, 129], [700] * 80], ids=len)
def test_decode_of_real_shapes(lens: list[int], H: int, KV: int, D: int, dtype: torch.dtype):
    check_decode(lens, H, KV, D, dtype, None)


def test_an_empty_decode_is_none():
    paged = Paged([1], 2, 1, 16)
    contexts = PagedContexts.build([], [], BLOCK, DEVICE)
    assert len(paged_decode_triton(paged.queries(0), paged.k_pool, paged.v_pool, 1.0, contexts)) == 0


def test_splits_follow_from_shapes():
    assert num_splits(1, 8, 131072, 128) == 64
    assert num_splits(64, 8, 8192, 128) == 4
    assert num_splits(256, 8, 131072, 128) == 4
    assert num_splits(256, 8, 128, 128) == 1
    assert num_splits(1, 8, 256, 128) == 2


@needs_gpu
def test_a_captured_decode_replays_with_other_contexts():
    paged = Paged([900, 40], 4, 2, 64, torch.bfloat16)
    q = paged.queries(2)
    full = PagedContexts.build([900, 40], paged.blocks, BLOCK, DEVICE)
    static = PagedContexts(torch.ones_like(full.lens_N), full.table_NM)
    run = lambda: paged_decode_triton(q, paged.k_pool, paged.v_pool, 0.125, static)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    static.lens_N.copy_(full.lens_N)
    graph.replay()
    for i in range(2):
        paged.check(out[i : i + 1], q[i : i + 1], i, 0.125)


def test_heads_that_do_not_lie_side_by_side_are_refused():
    paged = Paged([4], 2, 1, 16)
    contexts = PagedContexts.build([4], paged.blocks, BLOCK, DEVICE)
    q = paged.random(1, 2, 32)[..., ::2]
    with pytest.raises(ValueError, match="side by side"):
        paged_decode_triton(q, paged.k_pool, paged.v_pool, 1.0, contexts)
    with pytest.raises(ValueError, match="power of two"):
        paged_decode_triton(paged.random(1, 2, 24), paged.k_pool, paged.v_pool, 1.0, contexts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
@pytest.mark.parametrize("has_norm", [False, True])
def test_prepared_queries_and_keys_equal_norm_rotation_and_store(has_norm: bool, rotary_dim: int, dtype: torch.dtype):
    T, H, KV, D = 5, 6, 3, 24
    projected = torch.randn(T, (H + 2 * KV) * D + 7, device=DEVICE).to(dtype)
    norm = torch.rand(H + KV, D, device=DEVICE) if has_norm else None
    rotary = None
    if rotary_dim:
        positions = torch.tensor([0, 3, 70, 71, 4000], device=DEVICE)
        rotary = rotary_angles(positions, inverse_frequencies(rotary_dim, 1e4, DEVICE))
    block, offset = (torch.tensor(values, device=DEVICE) for values in ([2, 0, 2, 2, 1], [15, 0, 3, 4, 7]))
    results, pools = [], []
    for prepare in (prepare_qkv_torch, prepare_qkv_triton):
        pool = torch.full((4, 2, 2, BLOCK, KV, D), NAN, dtype=dtype, device=DEVICE)
        pools.append(pool)
        k_pool, v_pool = pool[:, 1, 0], pool[:, 1, 1]
        results.append(prepare(projected.clone(), k_pool, v_pool, block, offset, H, norm, 1e-3, rotary))
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for expected, actual in zip((*results[0], pools[0]), (*results[1], pools[1]), strict=True):
        torch.testing.assert_close(actual, expected, atol=bound, rtol=bound, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_angles_are_exact_at_any_position(rows: int):
    positions = torch.tensor([262143, 131071, 70, 1, 0], device=DEVICE)[:rows]
    frequencies = inverse_frequencies(24, 1e7, DEVICE)
    cos, sin = rotary_angles_triton(positions, frequencies)
    angles = (positions.float()[:, None, None] * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=1e-6, rtol=0)


def test_no_rows_prepare_nothing():
    pool = torch.full((2, BLOCK, 1, 16), NAN, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    q, k, v = prepare_qkv_triton(torch.empty(0, 64, device=DEVICE), pool, pool, none, none, 2, None, 1e-3, None)
    assert (len(q), len(k), len(v)) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kernels_compile_for_an_h200_and_spill_next_to_nothing():
    from tests.support.kernels.launches import attention_launches

    names, launches = zip(*attention_launches(), strict=True)
    # Tiles for heads of 256 and capped registers keep a little on the stack: still faster than tiles that keep none.
    # Of the kernel by hand it is what stands around its loops, and less by Triton 3.6, which the GPU machine has.
    most = {name: 160 if "by hand" in name else 96 for name in names}
    for name, report in zip(names, compile_for_h200(launches), strict=True):
        assert report.stack_bytes <= most[name] and report.shared_bytes <= 227 * 1024, name
