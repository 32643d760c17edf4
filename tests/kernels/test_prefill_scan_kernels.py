"""The Triton scans of SSD and the gated delta rule against token-by-token float64.

Everything the kernels do not write is NaN: unused slots, scratch and outputs before they are written.
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.prefill import gdn_prefill_torch
from headrace.kernels.gdn.scan import GdnTiles, gdn_prefill_triton
from headrace.kernels.lib.chunks import Chunk, ChunkTable, cut
from headrace.kernels.lib.segments import PrefillSegments, StateWrite
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.prefill import ssd_prefill_torch
from headrace.kernels.ssd.scan import SsdTiles, ssd_prefill_triton
from tests.kernels.naive import NAN, naive_gdn, naive_ssd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
native = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: too much for Triton's interpreter")
NUM_SLOTS = 24
# Of the norm, of what is computed and of a state that is stored. The interpreter cuts bfloat16 off where the GPU rounds
# to the nearest: twice the error.
CUT_OFF = 1 if DEVICE.type == "cuda" else 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: CUT_OFF * 1e-2}
STORED = {torch.float32: 0.0, torch.bfloat16: CUT_OFF * 2**-8}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
STATE_DTYPES = pytest.mark.parametrize("state_dtype", STORED, ids=lambda dtype: f"state-{dtype}")


@dataclass
class Ssd:
    """A Mamba2 layer's scan: H heads of P, N states, G groups."""

    H: int
    P: int
    N: int
    G: int
    tiles: SsdTiles | None = None
    heads: SsdHeads = field(init=False)

    def __post_init__(self) -> None:
        self.state_shape = (self.H, self.P, self.N)
        A, D, bias = -torch.rand(self.H, device=DEVICE) * 4, *torch.randn(2, self.H, device=DEVICE)
        self.heads = SsdHeads(A, D, bias - 2, dt_max=0.9)

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As the engine passes them: parts of wider rows, which begin at multiples of 16 numbers if their parts do."""
        shared, inner = self.G * self.N, self.H * self.P
        u = torch.randn(T, inner + 2 * shared + 16, device=DEVICE).to(dtype)
        x, B, C, _ = u.split((inner, shared, shared, 16), dim=-1)
        dt = torch.randn(T, self.H + 4, device=DEVICE).to(dtype)[:, : self.H]
        return (
            x.unflatten(1, (self.H, self.P)),
            dt,
            B.unflatten(1, (self.G, self.N)),
            C.unflatten(1, (self.G, self.N)),
        )

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C = inputs
        dt = softplus(raw.double() + self.heads.dt_bias).clamp(max=self.heads.dt_max)
        return naive_ssd(x, dt, self.heads.A, B, C, self.heads.D, state)

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        tiles = self.tiles if inputs[0].dtype == torch.bfloat16 else None
        return ssd_prefill_triton(*inputs, self.heads, pool, segments, tiles)

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        x, *others = inputs
        return ssd_prefill_torch(x.float(), *others, self.heads, pool, segments)


@dataclass
class Gdn:
    """A gated delta layer's scan: Hk key heads of K, Hv value heads of V."""

    Hk: int
    Hv: int
    K: int
    V: int
    tiles: GdnTiles | None = None

    def __post_init__(self) -> None:
        self.state_shape = (self.Hv, self.K, self.V)
        self.heads = GdnHeads(-torch.rand(self.Hv, device=DEVICE), torch.randn(self.Hv, device=DEVICE) - 1)

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.Hk * self.K, self.Hv * self.V
        u = torch.randn(T, 2 * keys + values, device=DEVICE).to(dtype)
        q, k, v = u.split((keys, keys, values), dim=-1)
        a, b = torch.randn(2, T, self.Hv + 3, device=DEVICE).to(dtype)[..., 3:]
        q, k = (each.unflatten(1, (self.Hk, self.K)) for each in (q, k))
        return q, k, v.unflatten(1, (self.Hv, self.V)), a, b

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        *qkv, a, b = inputs
        g = softplus(a.double() + self.heads.dt_bias) * self.heads.A
        return naive_gdn(*qkv, g, b.double().sigmoid(), state)

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        return gdn_prefill_triton(*inputs, self.heads, pool, segments, self.tiles)

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        q, k, v, a, b = inputs
        return gdn_prefill_torch(q.float(), k.float(), v.float(), a, b, self.heads, pool, segments)


Scan = Ssd | Gdn
# Sizes below the least that a matrix product takes, or no powers of two; and one whose rows begin at 32 bytes.
SMALL = {
    "ssd": lambda: Ssd(H=3, P=8, N=6, G=1),
    "ssd_groups": lambda: Ssd(H=4, P=20, N=6, G=2),
    "ssd_aligned": lambda: Ssd(H=8, P=16, N=24, G=1),
    "gdn": lambda: Gdn(Hk=2, Hv=2, K=8, V=6),
    "gdn_repeat": lambda: Gdn(Hk=2, Hv=4, K=6, V=20),
}
REAL = {
    "granite": lambda: Ssd(H=64, P=64, N=128, G=1),
    "nemotron": lambda: Ssd(H=32, P=64, N=128, G=8),
    "falcon": lambda: Ssd(H=24, P=64, N=256, G=1),
    "qwen": lambda: Gdn(Hk=16, Hv=32, K=128, V=128),
    "granite, cut as many rows are": lambda: Ssd(64, 64, 128, 1, SsdTiles(128, 64, 64, 8)),
}
every_small = pytest.mark.parametrize("name", SMALL)
every_real = pytest.mark.parametrize("name", REAL)


def poisoned_pool(scan: Scan, live_slots: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's view of a pool of two layers: NaN but for the live slots."""
    pool = torch.full((NUM_SLOTS, 2, *scan.state_shape), NAN, dtype=dtype, device=DEVICE)[:, 1]
    for slot in live_slots:
        pool[slot] = torch.randn(scan.state_shape)
    return pool


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def assert_only_changed(before: Tensor, after: Tensor, slots: list[int]) -> None:
    kept = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    bits = torch.int32 if before.dtype == torch.float32 else torch.int16
    assert torch.equal(before[kept].view(bits), after[kept].view(bits))


def check(
    scan: Scan,
    lengths: list[int],
    src: list[int | None],
    writes: list[tuple[int, int, int]],
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """One pass gives every row's output and every state asked for, and changes nothing else."""
    pool = poisoned_pool(scan, [slot for slot in src if slot is not None], state_dtype)
    before, inputs = pool.clone(), scan.inputs(sum(lengths), dtype)

    segments = PrefillSegments.build(lengths, src, [StateWrite(*write) for write in writes], DEVICE)
    y = scan.triton(inputs, pool, segments)

    starts = [torch.zeros(scan.state_shape, device=DEVICE) if slot is None else before[slot] for slot in src]
    rows = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    runs = [scan.naive(part, start) for part, start in zip(rows, starts, strict=True)]
    assert y.dtype == dtype
    tolerance = TOLERANCE[dtype]
    for actual, (expected, _) in zip(y.split(lengths), runs, strict=True):
        assert relative_error(actual, expected) < tolerance
    tolerance = max(tolerance, STORED[state_dtype])
    for sequence, num_rows, slot in writes:
        assert relative_error(pool[slot], runs[sequence][1][num_rows - 1]) < tolerance
    assert_only_changed(before, pool, [slot for _, _, slot in writes])


def test_chunks_end_where_states_are_written():
    chunks = cut(first_row=10, num_rows=300, writes=[(300, 7), (16, 5), (144, 6)], size=128)
    assert chunks == [
        Chunk(10, 16, 5),
        Chunk(26, 128, 6),
        Chunk(154, 128, None),
        Chunk(282, 28, 7),
    ]


def test_aligned_writes_cost_no_further_chunk():
    writes = [(row, row // 512) for row in range(512, 32769, 512)]
    assert len(cut(0, 32768, writes, 128)) == len(cut(0, 32768, writes[-1:], 128)) == 256


def test_rows_after_the_last_write_are_chunks_too():
    assert cut(0, 70, [(64, 3)], 64) == [Chunk(0, 64, 3), Chunk(64, 6, None)]
    assert cut(5, 64, [], 64) == [Chunk(5, 64, None)]


def test_a_row_with_two_writes_has_a_chunk_of_no_rows():
    assert cut(0, 64, [(64, 3), (64, 2)], 64) == [Chunk(0, 64, 2), Chunk(64, 0, 3)]


def test_tables_begin_at_multiples_of_16_bytes():
    chunks = [[Chunk(0, 64, None), Chunk(64, 3, 9)], [Chunk(67, 1, 4)]]
    table = ChunkTable.build(chunks, [None, 5], torch.device("cpu"))
    assert table.chunks_C4.tolist() == [[0, 64, -1, 0], [64, 3, 9, 0], [67, 1, 4, 0]]
    assert table.sequences_N4.tolist() == [[0, 2, -1, 0], [2, 3, 5, 0]]
    assert table.sequences_N4.data_ptr() % 16 == 0


@every_small
@DTYPES
def test_states_go_from_any_slots_to_any_slots(name: str, dtype: torch.dtype):
    lengths, src = [65, 3, 1, 129, 64], [3, None, 11, None, 5]
    dst = [3, 22, 17, 18, 0]  # the first sequence overwrites its own source
    check(SMALL[name](), lengths, src, [(i, n, dst[i]) for i, n in enumerate(lengths)], dtype)


@every_small
@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 127, 128, 200])
def test_sequences_of_any_length(name: str, length: int):
    check(SMALL[name](), [length], [2], [(0, length, 1)], torch.float32)


@every_small
@DTYPES
def test_states_at_many_rows_come_with_the_same_pass(name: str, dtype: torch.dtype):
    rows = [(0, 1), (0, 16), (0, 32), (0, 48), (0, 64), (0, 127), (1, 16), (1, 39)]
    writes = [(sequence, num_rows, 20 - i) for i, (sequence, num_rows) in enumerate(rows)]
    check(SMALL[name](), [130, 40], [3, None], writes, dtype)


@every_small
def test_a_state_goes_to_two_slots_and_its_source_is_read_before_a_checkpoint_replaces_it(name: str):
    check(SMALL[name](), [40, 20], [3, 6], [(0, 16, 3), (0, 40, 9), (0, 40, 4), (1, 20, 7)], torch.float32)


@every_small
@DTYPES
def test_pools_of_bfloat16(name: str, dtype: torch.dtype):
    check(SMALL[name](), [70, 5], [None, 2], [(0, 48, 1), (0, 70, 9), (1, 5, 2)], dtype, torch.bfloat16)


@every_small
def test_an_empty_batch_changes_nothing(name: str):
    scan = SMALL[name]()
    pool = poisoned_pool(scan, [2])
    before = pool.clone()
    assert len(scan.triton(scan.inputs(0, torch.float32), pool, PrefillSegments.build([], [], [], DEVICE))) == 0
    assert_only_changed(before, pool, [])


@every_small
def test_rows_in_pieces_are_refused(name: str):
    scan = SMALL[name]()
    first, *others = scan.inputs(4, torch.float32)
    scattered = first.repeat_interleave(2, dim=-1)[..., ::2]
    segments = PrefillSegments.build([4], [None], [], DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        scan.triton((scattered, *others), poisoned_pool(scan, []), segments)


@native
@every_real
@DTYPES
@STATE_DTYPES
def test_real_shapes_on_the_gpu(name: str, dtype: torch.dtype, state_dtype: torch.dtype):
    lengths = [300, 1, 16, 129, 64]
    ends = [(i, n, 20 - i) for i, n in enumerate(lengths)]
    writes = [(0, 48, 1), (0, 272, 2), (3, 112, 10), *ends]
    check(REAL[name](), lengths, [3, None, 4, 5, None], writes, dtype, state_dtype)


@native
@every_real
def test_long_prompts_on_the_gpu(name: str):
    """Against the float32 torch form, token by token being too slow: 8,192 rows, and a state at any boundary."""
    scan, T, rows = REAL[name](), 8192, [16, 4096, 4112, 8192]
    inputs = scan.inputs(T, torch.bfloat16)
    pools = [poisoned_pool(scan, []) for _ in range(2)]
    segments = PrefillSegments.build([T], [None], [StateWrite(0, n, i) for i, n in enumerate(rows)], DEVICE)

    y, expected = scan.triton(inputs, pools[0], segments), scan.torch(inputs, pools[1], segments)

    assert relative_error(y, expected.double()) < TOLERANCE[torch.bfloat16]
    for slot in range(len(rows)):
        assert relative_error(pools[0][slot], pools[1][slot].double()) < TOLERANCE[torch.bfloat16]


@native
@every_real
def test_the_same_rows_alone_and_in_a_batch_give_the_same_bits(name: str):
    """No state of one sequence reaches another, and no result depends on who shares the pass."""
    scan = REAL[name]()
    inputs = scan.inputs(500, torch.bfloat16)
    together, alone = poisoned_pool(scan, []), poisoned_pool(scan, [])
    writes = [StateWrite(0, 200, 0), StateWrite(1, 300, 1)]
    both = scan.triton(inputs, together, PrefillSegments.build([200, 300], [None, None], writes, DEVICE))
    second = tuple(tensor[200:] for tensor in inputs)
    one = scan.triton(second, alone, PrefillSegments.build([300], [None], [StateWrite(0, 300, 1)], DEVICE))
    assert torch.equal(both[200:], one)
    assert torch.equal(together[1], alone[1])
