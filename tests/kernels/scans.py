"""Suites for the Triton scans of recurrences, against token-by-token float64.

Everything the kernels do not write is NaN: unused slots, scratch and outputs before they are written.
"""

from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor

from headrace.kernels.lib.segments import PrefillSegments, StateWrite
from tests.kernels.naive import NAN
from tests.support.kernels.compiled import Compiled

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


class Scan(Protocol):
    """One layer's scan: inputs, and the ways to run it."""

    state_shape: tuple[int, ...]

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]: ...

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]: ...

    def triton(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor: ...

    def torch(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor: ...


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


class SmallScanTests:
    """Small sizes, for the interpreter; parametrised by `make`."""

    @DTYPES
    def test_states_go_from_any_slots_to_any_slots(self, make: Callable[[], Scan], dtype: torch.dtype):
        lengths, src = [65, 3, 1, 129, 64], [3, None, 11, None, 5]
        dst = [3, 22, 17, 18, 0]  # the first sequence overwrites its own source
        check(make(), lengths, src, [(i, n, dst[i]) for i, n in enumerate(lengths)], dtype)

    @pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 127, 128, 200])
    def test_sequences_of_any_length(self, make: Callable[[], Scan], length: int):
        check(make(), [length], [2], [(0, length, 1)], torch.float32)

    @DTYPES
    def test_states_at_many_rows_come_with_the_same_pass(self, make: Callable[[], Scan], dtype: torch.dtype):
        rows = [(0, 1), (0, 16), (0, 32), (0, 48), (0, 64), (0, 127), (1, 16), (1, 39)]
        writes = [(sequence, num_rows, 20 - i) for i, (sequence, num_rows) in enumerate(rows)]
        check(make(), [130, 40], [3, None], writes, dtype)

    def test_a_state_goes_to_two_slots_and_its_source_is_read_before_a_checkpoint_replaces_it(
        self, make: Callable[[], Scan]
    ):
        check(make(), [40, 20], [3, 6], [(0, 16, 3), (0, 40, 9), (0, 40, 4), (1, 20, 7)], torch.float32)

    @DTYPES
    def test_pools_of_bfloat16(self, make: Callable[[], Scan], dtype: torch.dtype):
        check(make(), [70, 5], [None, 2], [(0, 48, 1), (0, 70, 9), (1, 5, 2)], dtype, torch.bfloat16)

    def test_an_empty_batch_changes_nothing(self, make: Callable[[], Scan]):
        scan = make()
        pool = poisoned_pool(scan, [2])
        before = pool.clone()
        assert len(scan.triton(scan.inputs(0, torch.float32), pool, PrefillSegments.build([], [], [], DEVICE))) == 0
        assert_only_changed(before, pool, [])

    def test_rows_in_pieces_are_refused(self, make: Callable[[], Scan]):
        scan = make()
        first, *others = scan.inputs(4, torch.float32)
        scattered = first.repeat_interleave(2, dim=-1)[..., ::2]
        segments = PrefillSegments.build([4], [None], [], DEVICE)
        with pytest.raises(ValueError, match="contiguous"):
            scan.triton((scattered, *others), poisoned_pool(scan, []), segments)


class RealScanTests:
    """Sizes of real models, on a GPU; parametrised by `make`."""

    @DTYPES
    @STATE_DTYPES
    def test_real_shapes_on_the_gpu(self, make: Callable[[], Scan], dtype: torch.dtype, state_dtype: torch.dtype):
        lengths = [300, 1, 16, 129, 64]
        ends = [(i, n, 20 - i) for i, n in enumerate(lengths)]
        writes = [(0, 48, 1), (0, 272, 2), (3, 112, 10), *ends]
        check(make(), lengths, [3, None, 4, 5, None], writes, dtype, state_dtype)

    def test_long_prompts_on_the_gpu(self, make: Callable[[], Scan]):
        """8,192 rows, states at any boundary, against the torch reference in float32: token by token is too slow."""
        scan, T, rows = make(), 8192, [16, 4096, 4112, 8192]
        inputs = scan.inputs(T, torch.bfloat16)
        pools = [poisoned_pool(scan, []) for _ in range(2)]
        segments = PrefillSegments.build([T], [None], [StateWrite(0, n, i) for i, n in enumerate(rows)], DEVICE)

        y, expected = scan.triton(inputs, pools[0], segments), scan.torch(inputs, pools[1], segments)

        assert relative_error(y, expected.double()) < TOLERANCE[torch.bfloat16]
        for slot in range(len(rows)):
            assert relative_error(pools[0][slot], pools[1][slot].double()) < TOLERANCE[torch.bfloat16]

    def test_the_same_rows_alone_and_in_a_batch_give_the_same_bits(self, make: Callable[[], Scan]):
        """No state of one sequence reaches another, and no result depends on the other sequences of the pass."""
        scan = make()
        inputs = scan.inputs(500, torch.bfloat16)
        together, alone = poisoned_pool(scan, []), poisoned_pool(scan, [])
        writes = [StateWrite(0, 200, 0), StateWrite(1, 300, 1)]
        both = scan.triton(inputs, together, PrefillSegments.build([200, 300], [None, None], writes, DEVICE))
        second = tuple(tensor[200:] for tensor in inputs)
        one = scan.triton(second, alone, PrefillSegments.build([300], [None], [StateWrite(0, 300, 1)], DEVICE))
        assert torch.equal(both[200:], one)
        assert torch.equal(together[1], alone[1])


NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def types(inputs: str, floats: str, tables: str, strides: str, dtype: torch.dtype) -> dict[str, str]:
    """Types of arguments: `x_ptr` in the model's dtype, of float32 and table pointers, and strides `x_stride`."""
    named = {f"{name}_ptr": f"*{NAMES[dtype]}:16" for name in inputs.split()}
    named |= {f"{name}_ptr": "*fp32:16" for name in floats.split()}
    named |= {f"{name}_ptr": "*i32:16" for name in tables.split()}
    return named | {f"{name}_stride": "i32:16" for name in strides.split()}


def assert_keeps_to_registers_and_matrix_units(first: Compiled, *others: Compiled, spilled: int = 0) -> None:
    assert first.stack_bytes <= spilled, first
    for report in others:
        assert report.stack_bytes <= spilled, report
        assert "wgmma.mma_async" in report.ptx
        assert "cp.async" in report.ptx  # what the next chunk or head needs is on its way meanwhile
        assert report.accesses("st.global")[0] == "v4.b32", report
