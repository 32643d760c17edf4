"""Places of checked rows in Triton against the reference, and against what the host would say."""

import numpy as np
import pytest
import torch

from headrace.cache.tails import BehindCheck, Tail
from headrace.forward.sequence_input import SequenceInput, known_place, tail_fields
from headrace.kernels.sampling.checked_rows import (
    CheckField,
    CheckSources,
    place_checked_rows_torch,
    place_checked_rows_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (16, 99, 32)  # tokens of a block, the scratch block, places of a ring's row
NO_FIELDS = (0, 0, -1, -1, -1, 0, -1, -1, -1, -1, -1)


def sources() -> CheckSources:
    drawn = torch.arange(100, 180, device=DEVICE)
    drafted = torch.arange(500, 524, device=DEVICE).view(8, 3)
    return CheckSources(drawn, drafted, torch.tensor([0, 3, 1, 2, 3, 0, 1, 2], device=DEVICE))


@pytest.mark.parametrize("rows_each", [1, 2, 3, 4, 8])
def test_triton_places_rows_as_the_reference_does(rows_each: int) -> None:
    numbers = np.random.default_rng(rows_each)
    num_sequences = 9
    fields = torch.tensor(NO_FIELDS, dtype=torch.int32).repeat(num_sequences, 1)
    for b in range(num_sequences - 1):  # the last one is padding
        start, right = int(numbers.integers(20, 60)), int(numbers.integers(-1, 8))
        base = start - start % 16
        next_base = base + 16 if numbers.integers(2) else -1
        written = base + 16 if right < 0 and base + 16 <= start + rows_each else -1
        length = int(numbers.integers(1, rows_each + 1))
        draw = int(numbers.integers(0, 60)) if right >= 0 else -1
        fields[b] = torch.tensor([length, start, draw, right, b, base, 20 + b, next_base, 30 + b, b, written])
    known = torch.randint(0, 90, (num_sequences * rows_each,))
    future = torch.randint(-1, 24, (num_sequences * rows_each,))
    table = torch.randint(0, 50, (num_sequences, 7), dtype=torch.int32)[:, :6]
    args = [each.to(DEVICE) for each in (fields, known, future, table)]
    expected = place_checked_rows_torch(*args, sources(), SIZES)
    for ours, theirs in zip(place_checked_rows_triton(*args, sources(), SIZES), expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("start", range(28, 36))
@pytest.mark.parametrize("num_accepted", range(4))
def test_a_sequence_behind_a_check_stands_where_the_host_would_put_it(start: int, num_accepted: int) -> None:
    """The check before began at 28 to 35, with three drafts: its least next place is one further on."""
    written = start - start % 16 + 16
    base = written if written <= start + 4 else None
    behind = BehindCheck({0: 0, 1: 2, 2: 3, 3: 1}[num_accepted], 3, base, 7)
    entry = SequenceInput(
        [0, 0, 0],
        start + 1,
        [4, 5, 6, 7],
        src_slot=3,
        dst_slot=9,
        num_logits=3,
        future_token=11,
        future_drafts=2,
        tail=Tail(5, start - start % 16, None),
        behind=behind,
    )
    known = known_place(entry, num_accepted, interval=16)
    numbers = dict(zip(CheckField, NO_FIELDS, strict=True)) | {
        CheckField.LENGTH: 3,
        CheckField.START: start + 1,
        CheckField.DRAW: 11,
        CheckField.COUNTED_AT: behind.row,
        CheckField.SRC: 3,
        CheckField.BASE: start - start % 16,
        CheckField.NEXT_SRC: 7,
        CheckField.NEXT_BASE: -1 if base is None else base,
        CheckField.DST: 9,
        CheckField.ROW: 5,
    }
    fields = torch.tensor([[numbers[each] for each in CheckField]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 0, 0], device=DEVICE), torch.tensor([-1, 6, 7], device=DEVICE)
    table = torch.tensor([[4, 5, 6, 7]], dtype=torch.int32, device=DEVICE)
    found = place_checked_rows_torch(fields, *rows, table, sources(), SIZES)
    first = start + 1 + num_accepted
    assert found.tokens.tolist() == [111 + num_accepted, 506, 507]
    assert found.positions.tolist() == [first, first + 1, first + 2] and known.start == first
    assert found.blocks.tolist() == [4 + place // 16 for place in (first, first + 1, first + 2)]
    assert found.tails.cpu().tolist() == tail_fields([known], 32).tolist()
    assert found.sources.tolist() == [known.src_slot]
