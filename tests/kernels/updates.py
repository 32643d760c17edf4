"""Suites for the Triton decode kernels of recurrences, against token-by-token float64.

On a machine without a GPU they run in the interpreter, at small sizes; on a GPU also at the real models'.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import pytest
import torch
from torch import Tensor

from headrace.kernels.lib.dispatch import is_hopper
from headrace.kernels.lib.segments import StateSource
from tests.kernels.naive import NAN
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(not is_hopper(DEVICE), reason="needs a Hopper GPU")
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: too many programs for the interpreter")
NUM_SLOTS = 24
BF16_ERROR = 2**-8 if DEVICE.type == "cuda" else 2**-7  # the interpreter cuts bits off, it does not round


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def raw_columns(rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Columns of a projection: time steps, decays and betas as the engine passes them."""
    return randn(rows, heads + 8, dtype=dtype)[:, 8:]


class Recurrence(Protocol):
    """One layer's recurrence: its inputs, and what it must give."""

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]: ...

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]: ...


class Update(Recurrence, Protocol):
    """One that writes a state in each step, and the ways to run it."""

    def triton(self, inputs: tuple[Tensor, ...], *rest: object) -> Tensor: ...

    def torch(self, inputs: tuple[Tensor, ...], *rest: object) -> Tensor: ...


IN_PLACE, FRESH, MIXED = ([4], [4]), ([None], [21]), ([7, None, 2, 9, None], [7, 20, 19, 3, 0])


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


def check_against_naive(case: Update, src: list[int | None], dst: list[list[int]], pool_dtype, dtype) -> None:
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


class SmallUpdateTests:
    """Small sizes, for the interpreter; parametrised by `case`."""

    @pytest.mark.parametrize("src, dst", [IN_PLACE, FRESH, MIXED], ids=["in place", "fresh", "mixed"])
    def test_a_step_equals_the_recurrence(self, case: Update, src: list[int | None], dst: list[int]):
        check_against_naive(case, src, [[slot] for slot in dst], torch.float32, torch.float32)

    def test_a_bfloat16_pool_holds_rounded_states(self, case: Update):
        check_against_naive(case, [7, None], [[7], [20]], torch.bfloat16, torch.bfloat16)

    def test_each_draft_leaves_a_state_in_a_slot_of_its_own(self, case: Update):
        check_against_naive(case, [7, None], [[7, 11, 3], [20, 0, 5]], torch.float32, torch.float32)

    @pytest.mark.parametrize("implementation", ["triton", "torch"])
    @pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_drafts_equal_single_steps(self, case: Update, implementation: str, pool_dtype: torch.dtype):
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

    def test_a_row_without_a_destination_changes_no_slot(self, case: Update):
        pool, inputs = poisoned_pool(case, [7], torch.float32), case.inputs(2, torch.float32)
        before = pool.clone()
        case.triton(inputs, pool, StateSource.of([7, None], DEVICE), torch.tensor([7, -1], device=DEVICE))
        assert_only_changed(before, pool, [7])

    def test_an_empty_batch_changes_nothing(self, case: Update):
        pool = poisoned_pool(case, [2], torch.float32)
        before = pool.clone()
        none = torch.empty(0, dtype=torch.int64, device=DEVICE)
        assert len(case.triton(case.inputs(0, torch.float32), pool, StateSource.of([], DEVICE), none)) == 0
        assert_only_changed(before, pool, [])

    def test_rows_in_pieces_and_missing_destinations_are_refused(self, case: Update):
        pool, source = poisoned_pool(case, [2], torch.float32), StateSource.of([2], DEVICE)
        scattered = (torch.empty(1, *case.inputs(1, torch.float32)[0].shape[1:], 2, device=DEVICE)[..., 0],)
        with pytest.raises(ValueError, match="contiguous"):
            case.triton(scattered + case.inputs(1, torch.float32)[1:], pool, source, torch.tensor([2], device=DEVICE))
        with pytest.raises(ValueError, match="2 rows and destination slots"):
            case.triton(case.inputs(2, torch.float32), pool, source, torch.tensor([2], device=DEVICE))


class RealUpdateTests:
    """Sizes of real models, on a GPU; parametrised by `case`."""

    @pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("batch, steps", [(1, 1), (5, 1), (5, 4), (11, 1)])
    def test_real_sizes_equal_the_recurrence(self, case: Update, pool_dtype: torch.dtype, batch: int, steps: int):
        src = [None if i % 3 == 1 else i for i in range(batch)]
        slots = torch.randperm(NUM_SLOTS - batch)[: batch * (steps - 1)] + batch  # out of order
        dst = torch.cat((torch.arange(batch)[:, None], slots.view(batch, -1)), dim=1) if steps > 1 else None
        plan = dst.tolist() if dst is not None else [[i] for i in range(batch)]
        check_against_naive(case, src, plan, pool_dtype, torch.bfloat16)

    def test_a_captured_step_follows_the_slots_written_into_its_tensors(self, case: Update):
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


KILOBYTES_IN_FLIGHT = 32  # of loads a multiprocessor: 4.8 TB/s over 132 of them, 0.7 us until the bytes arrive
POOLS = {"fp32": 4, "bf16": 2}
WORDS = {4: "b32", 8: "v2.b32", 16: "v4.b32"}  # by bytes


def check_bytes_in_flight(launch_of: Callable[[str, int, int], Launch]) -> None:
    """Checks for enough bytes in flight for the memory's speed, in wide accesses, without spills."""
    cases = [(pool, batch, T) for pool in POOLS for batch, T in ((1, 1), (64, 1), (64, 4))]
    for (pool, batch, _), report in zip(cases, compile_for_h200([launch_of(*case) for case in cases]), strict=True):
        assert report.stack_bytes == 0, report
        launch = launch_of(pool, batch, 1)
        word = WORDS[launch.constexprs.get("ACCESS", 16)]
        assert report.accesses("st.global")[0] == word, report
        assert word in report.accesses("ld.global"), report
        if batch > 1:
            rows = launch.constexprs.get("TILE_P") or launch.constexprs["TILE_V"]
            tile_bytes = rows * 128 * POOLS[pool]
            resident = report.resident_warps // launch.num_warps
            assert resident * tile_bytes >= KILOBYTES_IN_FLIGHT * 1024, report
