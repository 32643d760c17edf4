"""Suites for the torch references of recurrences: against float64 token by token, in awkward shapes, poisoned pools."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.conv.prefill import causal_conv1d
from headrace.kernels.conv.update import causal_conv1d_update
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.prefill import gdn_prefill
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.prefill import kda_prefill
from headrace.kernels.kda.update import kda_update
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from headrace.kernels.mamba1.channels import Mamba1Channels
from headrace.kernels.mamba1.prefill import mamba1_prefill
from headrace.kernels.mamba1.update import mamba1_update
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.prefill import ssd_prefill
from tests.kernels.naive import NAN, naive_conv, naive_gdn, naive_mamba1, naive_ssd

CPU = torch.device("cpu")
NUM_SLOTS = 24
PREFILLS = {"ssd": ssd_prefill, "gdn": gdn_prefill, "kda": kda_prefill, "mamba1": mamba1_prefill, "conv": causal_conv1d}
UPDATES = {
    "kda": kda_update,
    "mamba1": mamba1_update,
    "conv": causal_conv1d_update,
}
DT_LIMITS = {"ssd": (0.0, float("inf")), "ssd_groups": (0.05, 0.9)}
LENGTHS = [[1], [31], [32], [33], [63], [64], [65], [130], [1, 64, 65], [65, 3, 1, 128, 17]]


@dataclass
class Case:
    """One recurrence: its inputs for T rows, and the three ways to run it."""

    name: str
    state_shape: tuple[int, ...]
    tolerance: float

    def inputs(self, T: int) -> tuple[Tensor, ...]:
        match self.name:
            case "ssd" | "ssd_groups":
                G = 1 if self.name == "ssd" else 2
                return torch.randn(T, 4, 8), torch.randn(T, 4) - 1, torch.randn(T, G, 6), torch.randn(T, G, 6)
            case "gdn" | "gdn_repeat":
                Hk = 4 if self.name == "gdn" else 2
                a, b = torch.randn(T, 4), torch.randn(T, 4)
                return torch.randn(T, Hk, 8), torch.randn(T, Hk, 8), torch.randn(T, 4, 6), a, b
            case "kda":
                q, k, f, v = (torch.randn(T, 4, size) for size in (8, 8, 8, 6))
                return q, k, v, 3 * f, torch.randn(T, 4)
            case "mamba1":
                x, dt, gate, B, C = torch.randn(T, 24 + 10).split((8, 8, 8, 5, 5), dim=-1)
                return x, dt - 1, B, C, gate
        return (torch.randn(T, 20)[:, 3:13],)  # conv: a slice of a wider projection

    def constants(self) -> tuple[SsdHeads | GdnHeads | KdaHeads | Mamba1Channels | Tensor | None, ...]:
        generator = torch.Generator().manual_seed(1)
        A, D, bias = -4 * torch.rand(4, generator=generator), *torch.randn(2, 4, generator=generator)
        if self.name.startswith("ssd"):
            return (SsdHeads(A, D, bias, *DT_LIMITS[self.name]),)
        if self.name.startswith("gdn"):
            return (GdnHeads(A / 4, bias),)
        if self.name == "mamba1":
            A = -4 * torch.rand(self.state_shape, generator=generator)
            return (Mamba1Channels(A, *torch.randn(2, 8, generator=generator)),)
        if self.name == "kda":
            return (KdaHeads(4 * A, torch.randn(4, 8, generator=generator)),)  # decays from 1 to below float32's least
        weight, bias = torch.randn(10, 4, generator=generator), torch.randn(10, generator=generator)
        return weight, bias if self.name == "conv_bias" else None

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.name.startswith("conv"):
            return naive_conv(*inputs, *self.constants(), state)
        [heads] = self.constants()
        if isinstance(heads, SsdHeads):
            x, raw, B, C = inputs
            dt = softplus(raw.double() + heads.dt_bias).clamp(*DT_LIMITS[self.name])
            return naive_ssd(x, dt, heads.A, B, C, heads.D, state)
        if isinstance(heads, Mamba1Channels):
            x, raw, B, C, gate = inputs
            return naive_mamba1(x, softplus(raw.double() + heads.dt_bias), heads.A, B, C, heads.D, gate, state)
        *qkv, a, b = inputs
        if isinstance(heads, KdaHeads):
            g = softplus(a.double() + heads.dt_bias) * heads.A[:, None]
            return naive_gdn(*qkv, g, b.double().sigmoid(), state)
        g = softplus(a.double() + heads.dt_bias) * heads.A
        return naive_gdn(*qkv, g, b.double().sigmoid(), state)

    def prefill(self, inputs: tuple[Tensor, ...], pool: Tensor, segments: PrefillSegments) -> Tensor:
        operation = PREFILLS[self.name.split("_")[0]]
        return operation(*inputs, *self.constants(), pool, segments)

    def update(self, inputs: tuple[Tensor, ...], pool: Tensor, source: StateSource, dst: Tensor) -> Tensor:
        operation = UPDATES[self.name.split("_")[0]]
        return operation(*inputs, *self.constants(), pool, source, dst)


def poisoned_pool(case: Case, live_slots: list[int]) -> Tensor:
    """A layer's view of a pool of three layers: NaN but for the live slots."""
    pool = torch.full((NUM_SLOTS, 3, *case.state_shape), NAN)[:, 1]
    for slot in live_slots:
        pool[slot] = torch.randn(case.state_shape)
    return pool


def split_rows(inputs: tuple[Tensor, ...], lengths: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(lengths) for tensor in inputs), strict=True))


def assert_only_changed(before: Tensor, after: Tensor, slots: list[int]) -> None:
    kept = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(before[kept].view(torch.int32), after[kept].view(torch.int32))


class PrefillTests:
    """Packed sequences in one pass; parametrised by `case`."""

    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    def test_prefill_equals_the_recurrence_from_any_slots_to_any_slots(self, case: Case, lengths: list[int]):
        src: list[int | None] = [None if i % 2 else 11 - i for i in range(len(lengths))]  # out of order, some fresh
        live = [slot for slot in src if slot is not None]
        pool = poisoned_pool(case, live)
        # The first sequence overwrites its own source; the others leave theirs alone.
        dst = [live[0], *(23 - i for i in range(1, len(lengths)))]
        before, inputs = pool.clone(), case.inputs(sum(lengths))
        writes = [StateWrite(i, length, slot) for i, (length, slot) in enumerate(zip(lengths, dst, strict=True))]

        y = case.prefill(inputs, pool, PrefillSegments.build(lengths, src, writes, CPU))

        for i, rows in enumerate(split_rows(inputs, lengths)):
            start = torch.zeros(case.state_shape) if src[i] is None else before[src[i]]
            expected, states = case.naive(rows, start)
            torch.testing.assert_close(y.split(lengths)[i].double(), expected, atol=case.tolerance, rtol=0)
            torch.testing.assert_close(pool[dst[i]].double(), states[-1], atol=case.tolerance, rtol=0)
        assert_only_changed(before, pool, dst)

    def test_states_at_many_rows_come_with_the_same_pass(self, case: Case):
        lengths, boundaries = [130, 40], [(0, 1), (0, 16), (0, 32), (0, 48), (0, 64), (0, 127), (1, 16), (1, 39)]
        pool = poisoned_pool(case, [3])
        before, inputs = pool.clone(), case.inputs(sum(lengths))
        slots = [20 - i for i in range(len(boundaries))]
        writes = [StateWrite(s, rows, slot) for (s, rows), slot in zip(boundaries, slots, strict=True)]

        case.prefill(inputs, pool, PrefillSegments.build(lengths, [3, None], writes, CPU))

        starts = [before[3], torch.zeros(case.state_shape)]
        rows_of = split_rows(inputs, lengths)
        states = [case.naive(rows, start)[1] for rows, start in zip(rows_of, starts, strict=True)]
        for (sequence, rows), slot in zip(boundaries, slots, strict=True):
            torch.testing.assert_close(pool[slot].double(), states[sequence][rows - 1], atol=case.tolerance, rtol=0)
        assert_only_changed(before, pool, slots)

    def test_states_at_every_block_boundary_of_a_long_sequence_come_with_the_same_pass(self, case: Case):
        length, rows = 300, [*range(16, 300, 16), 300]
        inputs, slots = case.inputs(length), list(range(NUM_SLOTS - 1, NUM_SLOTS - 1 - len(rows), -1))
        pool = poisoned_pool(case, [0])
        before = pool.clone()
        writes = [StateWrite(0, num_rows, slot) for num_rows, slot in zip(rows, slots, strict=True)]

        y = case.prefill(inputs, pool, PrefillSegments.build([length], [0], writes, CPU))

        expected, states = case.naive(inputs, before[0])
        torch.testing.assert_close(y.double(), expected, atol=case.tolerance, rtol=0)
        for num_rows, slot in zip(rows, slots, strict=True):
            torch.testing.assert_close(pool[slot].double(), states[num_rows - 1], atol=case.tolerance, rtol=0)
        assert_only_changed(before, pool, slots)

    @pytest.mark.parametrize("cut", [1, 16, 31, 32, 50])
    def test_prefill_in_two_parts_equals_one(self, case: Case, cut: int):
        pool = poisoned_pool(case, [])
        inputs = case.inputs(70)
        whole = case.prefill(inputs, pool, PrefillSegments.build([70], [None], [StateWrite(0, 70, 0)], CPU))
        first, rest = split_rows(inputs, [cut, 70 - cut])
        parts = [
            case.prefill(first, pool, PrefillSegments.build([cut], [None], [StateWrite(0, cut, 5)], CPU)),
            case.prefill(rest, pool, PrefillSegments.build([70 - cut], [5], [StateWrite(0, 70 - cut, 1)], CPU)),
        ]
        torch.testing.assert_close(torch.cat(parts), whole, atol=case.tolerance, rtol=0)
        torch.testing.assert_close(pool[1], pool[0], atol=case.tolerance, rtol=0)

    def test_an_empty_batch_changes_nothing(self, case: Case):
        pool = poisoned_pool(case, [2])
        before = pool.clone()
        assert len(case.prefill(case.inputs(0), pool, PrefillSegments.build([], [], [], CPU))) == 0
        assert_only_changed(before, pool, [])

    def test_rows_that_the_segments_do_not_describe_are_refused(self, case: Case):
        pool = poisoned_pool(case, [])
        with pytest.raises(ValueError, match="segments describe 3 rows"):
            case.prefill(case.inputs(4), pool, PrefillSegments.build([3], [None], [], CPU))

    def test_a_pool_of_another_shape_is_refused(self, case: Case):
        pool = torch.zeros(NUM_SLOTS, *case.state_shape[:-1], case.state_shape[-1] - 1)
        with pytest.raises(ValueError):
            case.prefill(case.inputs(3), pool, PrefillSegments.build([3], [None], [], CPU))


class UpdateTests:
    """One row a sequence; parametrised by `case`."""

    @pytest.mark.parametrize("src", [[4], [None], [7, None, 2, 9, None]], ids=str)
    def test_update_equals_one_step_of_the_recurrence(self, case: Case, src: list[int | None]):
        pool = poisoned_pool(case, [slot for slot in src if slot is not None])
        before, inputs = pool.clone(), case.inputs(len(src))
        dst = [src[0] or 21, *(20 - i for i in range(1, len(src)))]

        y = case.update(inputs, pool, StateSource.of(src, CPU), torch.tensor(dst))

        for i, rows in enumerate(split_rows(inputs, [1] * len(src))):
            start = torch.zeros(case.state_shape) if src[i] is None else before[src[i]]
            expected, states = case.naive(rows, start)
            torch.testing.assert_close(y[i].double(), expected[0], atol=case.tolerance, rtol=0)
            torch.testing.assert_close(pool[dst[i]].double(), states[0], atol=case.tolerance, rtol=0)
        assert_only_changed(before, pool, dst)

    def test_an_empty_batch_changes_nothing(self, case: Case):
        pool = poisoned_pool(case, [2])
        before = pool.clone()
        empty = torch.empty(0, dtype=torch.int64)
        assert len(case.update(case.inputs(0), pool, StateSource.of([], CPU), empty)) == 0
        assert_only_changed(before, pool, [])

    def test_a_pool_of_another_shape_is_refused(self, case: Case):
        pool = torch.zeros(NUM_SLOTS, *case.state_shape[:-1], case.state_shape[-1] - 1)
        with pytest.raises(ValueError):
            case.update(case.inputs(1), pool, StateSource.of([None], CPU), torch.tensor([0]))
