"""The Triton decode kernels (SSD, gated delta rule, convolution) against token-by-token float64.

On a machine without a GPU they run in the interpreter, at small sizes; on a GPU also at the real models'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn import update as gdn_update
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.update import GdnTile, gdn_update_torch, gdn_update_triton
from headrace.kernels.lib.exponentials import softplus as softplus_triton
from headrace.kernels.lib.segments import StateSource
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.update import ssd_update_torch, ssd_update_triton
from tests.kernels.naive import NAN, naive_gdn, naive_ssd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: too many programs for the interpreter")
NUM_SLOTS = 24
BF16_ERROR = 2**-8 if DEVICE.type == "cuda" else 2**-7  # the interpreter cuts bits off, it does not round


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def raw_columns(rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Columns of a projection: time steps, decays and betas as the engine passes them."""
    return randn(rows, heads + 8, dtype=dtype)[:, 8:]


@dataclass(frozen=True)
class Ssd:
    """Inputs as the engine passes them: x, B and C are slices of the convolution's output."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_size

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inner, shared = self.heads * self.head_dim, self.groups * self.state_size
        x, B, C = randn(R, inner + 2 * shared, dtype=dtype).split((inner, shared, shared), dim=-1)
        dt = raw_columns(R, self.heads, dtype)
        return (
            x.view(R, self.heads, self.head_dim),
            dt,
            B.view(R, self.groups, self.state_size),
            C.view(R, self.groups, self.state_size),
        )

    def constants(self) -> SsdHeads:
        place = torch.arange(self.heads, device=DEVICE)
        return SsdHeads(-0.1 - place % 7, 1 - place * 0.1, place % 5 - 3.0, *self.dt_limits)

    def triton(self, inputs, *rest) -> Tensor:
        return ssd_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return ssd_update_torch(*inputs, self.constants(), *rest)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C = inputs
        heads = self.constants()
        dt = softplus(raw.double() + heads.dt_bias).clamp(*self.dt_limits)
        return naive_ssd(x, dt, heads.A, B, C, heads.D, state)


@dataclass(frozen=True)
class Gdn:
    """Inputs as the engine passes them: q, k and v are slices of the convolution's output."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = randn(R, 2 * keys + values, dtype=dtype).split((keys, keys, values), dim=-1)
        return (
            q.view(R, self.key_heads, self.key_dim),
            k.view(R, self.key_heads, self.key_dim),
            v.view(R, self.value_heads, self.value_dim),
            raw_columns(R, self.value_heads, dtype),
            raw_columns(R, self.value_heads, dtype),
        )

    def constants(self) -> GdnHeads:
        place = torch.arange(self.value_heads, device=DEVICE)
        return GdnHeads(-0.1 - place % 7, place % 5 - 3.0)

    def triton(self, inputs, *rest) -> Tensor:
        return gdn_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return gdn_update_torch(*inputs, self.constants(), *rest)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v, a, b = inputs
        heads = self.constants()
        return naive_gdn(q, k, v, softplus(a.double() + heads.dt_bias) * heads.A, b.double().sigmoid(), state)


Recurrence = Ssd | Gdn
SMALL = [Ssd(4, 8, 1, 16), Ssd(2, 20, 2, 6, (0.05, 0.9)), Gdn(2, 4, 16, 8), Gdn(1, 1, 6, 40)]
REAL = [Ssd(64, 64, 1, 128), Ssd(32, 64, 8, 256), Gdn(16, 32, 128, 128)]
IN_PLACE, FRESH, MIXED = ([4], [4]), ([None], [21]), ([7, None, 2, 9, None], [7, 20, 19, 3, 0])
small = pytest.mark.parametrize("case", SMALL, ids=str)


def poisoned_pool(case: Recurrence, live: Sequence[int | None], dtype: torch.dtype) -> Tensor:
    """A layer's view of a pool of three layers: NaN but for the live slots."""
    pool = torch.full((NUM_SLOTS, 3, *case.state_shape), NAN, dtype=dtype, device=DEVICE)[:, 1]
    for slot in live:
        if slot is not None:
            pool[slot] = randn(*case.state_shape)
    return pool


def assert_only_changed(before: Tensor, after: Tensor, slots: Sequence[int]) -> None:
    kept = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(before[kept].nan_to_num(12345.0), after[kept].nan_to_num(12345.0))


def check_against_naive(case: Recurrence, src: list[int | None], dst: list[list[int]], pool_dtype, dtype) -> None:
    T = len(dst[0])
    pool = poisoned_pool(case, src, pool_dtype)
    before, inputs = pool.clone(), case.inputs(len(src) * T, dtype)
    dst_slots = torch.tensor(dst, device=DEVICE)

    y = case.triton(inputs, pool, StateSource.of(src, DEVICE), dst_slots)

    # A state is as exact as its pool, and an output as its dtype.
    state_error = {"atol": 5e-5, "rtol": BF16_ERROR if pool_dtype == torch.bfloat16 else 0}
    output_error = {"atol": 1e-4, "rtol": BF16_ERROR if dtype == torch.bfloat16 else 0}
    for i, slot in enumerate(src):
        state = torch.zeros(case.state_shape, device=DEVICE) if slot is None else before[slot]
        for t in range(T):
            row = i * T + t
            [expected], [after] = case.naive(tuple(tensor[row : row + 1] for tensor in inputs), state)
            torch.testing.assert_close(y[row].double(), expected, **output_error)
            torch.testing.assert_close(pool[dst[i][t]].double(), after, **state_error)
            state = pool[dst[i][t]]  # a draft continues from what the pool holds
    assert_only_changed(before, pool, [slot for slots in dst for slot in slots])


@small
@pytest.mark.parametrize("src, dst", [IN_PLACE, FRESH, MIXED], ids=["in place", "fresh", "mixed"])
def test_a_step_equals_the_recurrence(case: Recurrence, src: list[int | None], dst: list[int]):
    check_against_naive(case, src, [[slot] for slot in dst], torch.float32, torch.float32)


@small
def test_a_bfloat16_pool_holds_rounded_states(case: Recurrence):
    check_against_naive(case, [7, None], [[7], [20]], torch.bfloat16, torch.bfloat16)


@small
def test_each_draft_leaves_a_state_in_a_slot_of_its_own(case: Recurrence):
    check_against_naive(case, [7, None], [[7, 11, 3], [20, 0, 5]], torch.float32, torch.float32)


@small
@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_equal_single_steps(case: Recurrence, implementation: str, pool_dtype: torch.dtype):
    pool, inputs = poisoned_pool(case, [7], pool_dtype), case.inputs(3, torch.float32)
    single, run = pool.clone(), getattr(case, implementation)

    together = run(inputs, pool, StateSource.of([7], DEVICE), torch.tensor([[8, 2, 5]], device=DEVICE))
    slots = [7, 8, 2, 5]
    outputs = [
        run(
            tuple(tensor[t : t + 1] for tensor in inputs),
            single,
            StateSource.of([slots[t]], DEVICE),
            torch.tensor([slots[t + 1]], device=DEVICE),
        )
        for t in range(3)
    ]

    # Compiled for one step and for three, the same sums may round apart: by one place of the pool's numbers.
    error = BF16_ERROR if pool_dtype == torch.bfloat16 and DEVICE.type == "cuda" else 1e-6
    torch.testing.assert_close(together, torch.cat(outputs), atol=10 * error, rtol=error)
    torch.testing.assert_close(pool[slots], single[slots], atol=error, rtol=error)


@small
def test_a_row_without_a_destination_changes_no_slot(case: Recurrence):
    pool, inputs = poisoned_pool(case, [7], torch.float32), case.inputs(2, torch.float32)
    before = pool.clone()
    case.triton(inputs, pool, StateSource.of([7, None], DEVICE), torch.tensor([7, -1], device=DEVICE))
    assert_only_changed(before, pool, [7])


@small
def test_an_empty_batch_changes_nothing(case: Recurrence):
    pool = poisoned_pool(case, [2], torch.float32)
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert len(case.triton(case.inputs(0, torch.float32), pool, StateSource.of([], DEVICE), none)) == 0
    assert_only_changed(before, pool, [])


@small
def test_rows_in_pieces_and_missing_destinations_are_refused(case: Recurrence):
    pool, source = poisoned_pool(case, [2], torch.float32), StateSource.of([2], DEVICE)
    scattered = (torch.empty(1, *case.inputs(1, torch.float32)[0].shape[1:], 2, device=DEVICE)[..., 0],)
    with pytest.raises(ValueError, match="contiguous"):
        case.triton(scattered + case.inputs(1, torch.float32)[1:], pool, source, torch.tensor([2], device=DEVICE))
    with pytest.raises(ValueError, match="2 rows and destination slots"):
        case.triton(case.inputs(2, torch.float32), pool, source, torch.tensor([2], device=DEVICE))


@pytest.mark.parametrize("tile", [GdnTile(4, 2, 4), GdnTile(8, 1, 8), GdnTile(4, 2, 2)], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_cut_of_the_work_gives_the_recurrence(tile: GdnTile, pool_dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(gdn_update, "launch_shape", lambda *_: tile)
    check_against_naive(Gdn(2, 4, 16, 8), [7, None], [[7, 11], [20, 0]], pool_dtype, torch.float32)


@triton.jit
def _softplus_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + place, softplus_triton(tl.load(x_ptr + place)))


def test_softplus_is_exact_where_it_is_small():
    x = torch.linspace(-30, 30, 256, device=DEVICE)
    y = torch.empty_like(x)
    _softplus_kernel[(1,)](x, y, BLOCK=256)
    torch.testing.assert_close(y.double(), torch.log1p(x.double().exp()), atol=0, rtol=5e-6)


@needs_gpu
@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, steps", [(1, 1), (5, 1), (5, 4), (11, 1)])
def test_real_sizes_equal_the_recurrence(case: Recurrence, pool_dtype: torch.dtype, batch: int, steps: int):
    src = [None if i % 3 == 1 else i for i in range(batch)]
    slots = torch.randperm(NUM_SLOTS - batch)[: batch * (steps - 1)] + batch  # out of order
    dst = torch.cat((torch.arange(batch)[:, None], slots.view(batch, -1)), dim=1) if steps > 1 else None
    plan = dst.tolist() if dst is not None else [[i] for i in range(batch)]
    check_against_naive(case, src, plan, pool_dtype, torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize("case", REAL, ids=str)
def test_a_captured_step_follows_the_slots_written_into_its_tensors(case: Recurrence):
    source, dst = StateSource.of([3, None], DEVICE), torch.tensor([3, 4], device=DEVICE)
    inputs, pool = case.inputs(2, torch.bfloat16), poisoned_pool(case, [3, 5, 6], torch.float32)
    graph = torch.cuda.CUDAGraph()
    case.triton(inputs, pool, source, dst)  # compiled before the capture
    with torch.cuda.graph(graph):
        y = case.triton(inputs, pool, source, dst)
    expected = pool.clone()
    source.slots_N.copy_(torch.tensor([5, 6]))
    dst.copy_(torch.tensor([9, -1]))
    graph.replay()
    y_expected = case.triton(inputs, expected, StateSource.of([5, 6], DEVICE), torch.tensor([9, 10], device=DEVICE))
    torch.testing.assert_close(y, y_expected, atol=0, rtol=0)
    assert torch.equal(pool[9], expected[9])
    assert pool[10].isnan().all()
