"""A suite for decode kernels over tails, against token-by-token float64: torch's forms and Triton's.

On a machine without a GPU Triton's run in the interpreter, at small sizes; on a GPU also at the real models'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from headrace.kernels.lib.tails import TailField, Tails
from tests.kernels.naive import NAN
from tests.kernels.updates import (
    BF16_ERROR,
    DEVICE,
    KILOBYTES_IN_FLIGHT,
    NUM_SLOTS,
    POOLS,
    Recurrence,
    assert_only_changed,
    poisoned_pool,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

INTERVAL, PLACES, NUM_ROWS = 4, 8, 6
IMPLEMENTATIONS = ["triton", "torch"]


class TailCase(Recurrence, Protocol):
    """One layer's recurrence over a tail."""

    def new_tail(self, num_rows: int, num_places: int, dtype: torch.dtype) -> tuple[Tensor, ...]: ...

    def over_tail(
        self, implementation: str, inputs: tuple[Tensor, ...], pool: Tensor, tail: Any, tails: Tails
    ) -> Tensor: ...


def poisoned_tail(case: TailCase, num_places: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    tail = case.new_tail(NUM_ROWS, num_places, dtype)
    for ring in tail:
        ring.fill_(NAN)
    return tail


def tails_of(fields: Sequence[Sequence[int]], rows_each: int) -> Tails:
    return Tails(torch.tensor(fields, dtype=torch.int32, device=DEVICE).view(-1, len(TailField)), rows_each)


@dataclass
class Running:
    """A sequence: the slot of its state, None before any, that state's position, and the inputs of its tokens since."""

    row: int
    slot: int | None
    base: int
    kept: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.base + len(self.kept)


@dataclass
class Player:
    """Sequences that decode in common steps, each checked against the recurrence from the state at its base."""

    case: TailCase
    implementation: str
    pool_dtype: torch.dtype
    dtype: torch.dtype
    running: list[Running]
    interval: int = INTERVAL
    pool: Tensor = field(init=False)
    tail: tuple[Tensor, ...] = field(init=False)
    num_written: int = 0

    def __post_init__(self) -> None:
        self.pool = poisoned_pool(self.case, [each.slot for each in self.running], self.pool_dtype)
        self.tail = poisoned_tail(self.case, 2 * self.interval, self.dtype)

    def step(self, rows_each: int, accepted: Sequence[int], *, in_place: bool = False) -> None:
        """A step of so many rows of each sequence, of which so many of each count."""
        inputs, before = self.case.inputs(len(self.running) * rows_each, self.dtype), self.pool.clone()
        free = [slot for slot in range(NUM_SLOTS) if slot not in [each.slot for each in self.running]]
        fields, written = [], []
        for each in self.running:
            boundary = each.position // self.interval * self.interval + self.interval
            dst, count = -1, 0
            if boundary <= each.position + rows_each:
                dst = each.slot if in_place and each.slot is not None else free.pop()
                count = boundary - each.base
            written.append((dst, count))
            src = -1 if each.slot is None else each.slot
            fields.append([src, dst, each.row, each.base % (2 * self.interval), len(each.kept), count])
        y = self.case.over_tail(self.implementation, inputs, self.pool, self.tail, tails_of(fields, rows_each))

        for i, (each, (dst, count)) in enumerate(zip(self.running, written, strict=True)):
            rows = [tuple(t[i * rows_each + n : i * rows_each + n + 1] for t in inputs) for n in range(rows_each)]
            self._check(each, rows, y[i * rows_each : (i + 1) * rows_each], before, dst, count)
            each.kept += rows[: accepted[i]]
            if dst >= 0 and count <= len(each.kept):
                each.kept, each.slot, each.base = each.kept[count:], dst, each.base + count
        assert_only_changed(before, self.pool, [dst for dst, _ in written if dst >= 0])

    def write(self) -> None:
        """A step of no rows: each sequence's newest state goes to its own slot, or to one of its own."""
        before = self.pool.clone()
        fields, slots = [], []
        for number, each in enumerate(self.running):
            slots.append(NUM_SLOTS - 1 - number if each.slot is None else each.slot)
            src, count = -1 if each.slot is None else each.slot, len(each.kept)
            fields.append([src, slots[-1], each.row, each.base % (2 * self.interval), count, count])
        none = self.case.inputs(0, self.dtype)
        assert len(self.case.over_tail(self.implementation, none, self.pool, self.tail, tails_of(fields, 0))) == 0
        for each, slot in zip(self.running, slots, strict=True):
            self._check(each, [], self.pool[:0], before, slot, len(each.kept))
            each.slot, each.base, each.kept = slot, each.position, []

    def _check(
        self, each: Running, rows: list[tuple[Tensor, ...]], y: Tensor, before: Tensor, dst: int, count: int
    ) -> None:
        state = torch.zeros(self.case.state_shape, device=DEVICE) if each.slot is None else before[each.slot]
        states, outputs = [state], []
        for row in [*each.kept, *rows]:
            [output], [state] = self.case.naive(row, state)
            states.append(state)
            outputs.append(output)
        # A state is as exact as its pool, and an output as its dtype. A delta rule's entries may come from before the
        # base was rounded, and are rounded themselves.
        if rows:
            atol, rtol = (0.1, BF16_ERROR) if self.dtype == torch.bfloat16 else (2e-4, 2e-5)
            new = torch.stack(outputs[len(each.kept) :])
            torch.testing.assert_close(y.double(), new, atol=max(atol, self._rounding), rtol=rtol)
        if dst >= 0:
            atol = 0.1 if self.dtype == torch.bfloat16 else 1e-4
            rtol = 2e-5 if self.pool_dtype == self.dtype == torch.float32 else BF16_ERROR
            found, expected = self.pool[dst].double(), states[count].double()
            torch.testing.assert_close(found, expected, atol=max(atol, self._rounding), rtol=rtol)
            self.num_written += 1

    @property
    def _rounding(self) -> float:
        return 0.01 if self.pool_dtype == torch.bfloat16 else 0.0


def three(slot: int | None = 7) -> list[Running]:
    """Behind a prompt, behind a state at a boundary of a ring that begins anew, and one without a state."""
    return [Running(4, 3, 5), Running(0, slot, 2 * INTERVAL), Running(2, None, 0)]


class TailTests:
    """Small sizes, for the interpreter; parametrised by `case`."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("in_place", [False, True], ids=["elsewhere", "in place"])
    def test_single_steps_equal_the_recurrence_over_blocks(self, case: TailCase, implementation: str, in_place: bool):
        player = Player(case, implementation, torch.float32, torch.float32, three())
        for _ in range(2 * INTERVAL + 1):
            player.step(1, [1, 1, 1], in_place=in_place)
        assert player.num_written == 6

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("rows_each", [2, 3])  # as many as a power of two, and padded to the next one
    def test_drafts_leave_nothing_where_they_are_rejected(self, case: TailCase, implementation: str, rows_each: int):
        player = Player(case, implementation, torch.float32, torch.float32, three())
        for accepted in ([1, 2, 1], [2, 1, 2], [1, 1, 2], [rows_each, 1, 1], [1, rows_each, 2], [1, 1, 1]):
            player.step(rows_each, accepted)
        assert player.num_written > 4

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_bfloat16_pool_holds_rounded_states(self, case: TailCase, implementation: str):
        player = Player(case, implementation, torch.bfloat16, torch.float32, three())
        for accepted in ([1, 2, 1], [2, 2, 2], [2, 1, 2]):
            player.step(2, accepted)
        assert player.num_written > 2

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_step_of_no_rows_writes_the_newest_states(self, case: TailCase, implementation: str):
        player = Player(case, implementation, torch.float32, torch.float32, three())
        for _ in range(2):
            player.step(1, [1, 1, 1])
        player.write()
        for _ in range(2):
            player.step(1, [1, 1, 1])

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_rows_at_once_equal_single_steps(self, case: TailCase, implementation: str):
        inputs = case.inputs(3, torch.float32)
        pool = poisoned_pool(case, [7], torch.float32)
        single, tail = pool.clone(), poisoned_tail(case, PLACES, torch.float32)
        alone = poisoned_tail(case, PLACES, torch.float32)
        together = case.over_tail(implementation, inputs, pool, tail, tails_of([[7, 9, 1, 6, 0, 3]], 3))
        outputs = [
            case.over_tail(
                implementation,
                tuple(t[i : i + 1] for t in inputs),
                single,
                alone,
                tails_of([[7, 9 if i == 2 else -1, 1, 6, i, 3 if i == 2 else 0]], 1),
            )
            for i in range(3)
        ]
        torch.testing.assert_close(together, torch.cat(outputs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pool[9], single[9], atol=1e-5, rtol=1e-5)
        for ring, ring_alone in zip(tail, alone, strict=True):
            torch.testing.assert_close(ring, ring_alone, atol=1e-5, rtol=1e-5, equal_nan=True)

    def test_padding_reads_and_writes_nothing(self, case: TailCase):
        """Its outputs are finite, as those of the sequence beside it."""
        pool, tail = poisoned_pool(case, [7], torch.float32), poisoned_tail(case, PLACES, torch.float32)
        before, rings = pool.clone(), [ring.clone() for ring in tail]
        padded = tails_of([[7, 9, 1, 0, 0, 1], [-1, -1, -1, 0, 0, 0]], 2)
        y = case.over_tail("triton", case.inputs(4, torch.float32), pool, tail, padded)
        assert y.isfinite().all()
        assert_only_changed(before, pool, [9])
        for ring, ring_before in zip(tail, rings, strict=True):
            assert torch.equal(ring[[0, 2, 3, 4, 5]].isnan(), ring_before[[0, 2, 3, 4, 5]].isnan())
            assert ring[1, :2].isfinite().all() and ring[1, 2:].isnan().all()

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_an_empty_batch_changes_nothing(self, case: TailCase, implementation: str):
        pool, tail = poisoned_pool(case, [2], torch.float32), poisoned_tail(case, PLACES, torch.float32)
        before = pool.clone()
        none = case.inputs(0, torch.float32)
        assert len(case.over_tail(implementation, none, pool, tail, tails_of([], 1))) == 0
        assert_only_changed(before, pool, [])


REAL_INTERVAL = 16


class RealTailTests:
    """Sizes of real models, on a GPU; parametrised by `case`."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("rows_each", [1, 2, 4, 8])
    def test_real_sizes_equal_the_recurrence(self, case: TailCase, pool_dtype, dtype, rows_each: int):
        play_at_real_sizes(case, "triton", pool_dtype, dtype, rows_each)

    def test_a_captured_step_follows_the_fields_written_into_its_tensor(self, case: TailCase):
        pool = poisoned_pool(case, [3, 5], torch.float32)
        tail = poisoned_tail(case, 2 * REAL_INTERVAL, torch.bfloat16)
        inputs, tails = case.inputs(2, torch.bfloat16), tails_of([[3, -1, 1, 0, 0, 0], [-1, -1, -1, 0, 0, 0]], 1)
        case.over_tail("triton", inputs, pool, tail, tails)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case.over_tail("triton", inputs, pool, tail, tails)
        after = tails_of([[3, -1, 1, 0, 1, 0], [5, 9, 4, 7, 0, 1]], 1)
        expected, rings = pool.clone(), [ring.clone() for ring in tail]
        y_expected = case.over_tail("triton", inputs, expected, type(tail)(*rings), after)
        tails.fields.copy_(after.fields)
        graph.replay()
        torch.testing.assert_close(y, y_expected, atol=0, rtol=0)
        assert torch.equal(pool[9], expected[9])
        for ring, ring_expected in zip(tail, rings, strict=True):
            torch.testing.assert_close(ring, ring_expected, atol=0, rtol=0, equal_nan=True)


class HopperTailTests:
    """Sizes of real models, on a Hopper GPU; parametrised by `case`."""

    @pytest.mark.parametrize("rows_each", [1, 2, 3, 4, 5, 8])
    def test_real_sizes_equal_the_recurrence(self, case: TailCase, rows_each: int):
        play_at_real_sizes(case, "hopper", torch.bfloat16, torch.bfloat16, rows_each)

    @pytest.mark.parametrize("rows_each", [1, 4])
    def test_a_state_may_be_written_over_its_source(self, case: TailCase, rows_each: int):
        play_at_real_sizes(case, "hopper", torch.bfloat16, torch.bfloat16, rows_each, in_place=True)

    @pytest.mark.parametrize("rows_each", [1, 4])
    def test_a_ring_need_not_be_a_power_of_two(self, case: TailCase, rows_each: int):
        play_at_real_sizes(case, "hopper", torch.bfloat16, torch.bfloat16, rows_each, interval=12)

    def test_a_step_of_no_rows_writes_the_newest_states(self, case: TailCase):
        player = Player(case, "hopper", torch.bfloat16, torch.bfloat16, real_four(), REAL_INTERVAL)
        for _ in range(3):
            player.step(2, [1, 2, 1, 2])
        player.write()
        player.step(1, [1, 1, 1, 1])

    def test_padding_reads_and_writes_nothing(self, case: TailCase):
        pool = poisoned_pool(case, [7], torch.bfloat16)
        tail = poisoned_tail(case, 2 * REAL_INTERVAL, torch.bfloat16)
        before = pool.clone()
        padded = tails_of([[7, 9, 1, 0, 0, 1], [-1, -1, -1, 0, 0, 0]], 2)
        y = case.over_tail("hopper", case.inputs(4, torch.bfloat16), pool, tail, padded)
        assert y.isfinite().all()
        assert_only_changed(before, pool, [9])
        for ring in tail:
            assert ring[[0, 2, 3, 4, 5]].isnan().all()
            assert ring[1, :2].isfinite().all() and ring[1, 2:].isnan().all()


def real_four() -> list[Running]:
    """Behind a prompt, two at different places of their blocks, and one without a state."""
    return [Running(4, 3, 21), Running(0, 7, 32), Running(2, None, 0), Running(5, 1, 47)]


def play_at_real_sizes(
    case: TailCase,
    implementation: str,
    pool_dtype: torch.dtype,
    dtype: torch.dtype,
    rows_each: int,
    *,
    in_place: bool = False,
    interval: int = REAL_INTERVAL,
) -> None:
    running = real_four()
    player = Player(case, implementation, pool_dtype, dtype, running, interval)
    for number in range(20):
        # A state that rests on a wrong draft must not take the place of the one that tokens go on from.
        accepted = [rows_each if in_place else 1 + (number + i) % rows_each for i in range(len(running))]
        player.step(rows_each, accepted, in_place=in_place)
    assert player.num_written > 4


def check_hopper_bytes_in_flight(launch_of: Callable[[int], Launch], bytes_a_program: int) -> None:
    """Checks for enough bytes of states in flight for the memory's speed, without spills."""
    launches = [launch_of(T) for T in (0, 1, 4, 8)]
    for launch, report in zip(launches, compile_for_h200(launches), strict=True):
        assert report.stack_bytes == 0, report
        resident = report.resident_warps // launch.num_warps
        assert resident * bytes_a_program >= KILOBYTES_IN_FLIGHT * 1024, report


def check_bytes_in_flight(launch_of: Callable[[str, int, int], Launch]) -> None:
    """Checks for enough bytes of states in flight for the memory's speed, without spills."""
    cases = [(pool, batch, T) for pool in POOLS for batch, T in ((1, 1), (64, 1), (64, 4))]
    for (pool, batch, T), report in zip(cases, compile_for_h200([launch_of(*case) for case in cases]), strict=True):
        assert report.stack_bytes == 0, report
        if batch > 1:
            launch = launch_of(pool, batch, T)
            rows = launch.constexprs.get("TILE_P") or launch.constexprs["TILE_V"]
            resident = report.resident_warps // launch.num_warps
            assert resident * rows * 128 * POOLS[pool] >= KILOBYTES_IN_FLIGHT * 1024, report
