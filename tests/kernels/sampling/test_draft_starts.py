"""Starts of drafts in Triton against the reference, and against plain arithmetic."""

import pytest
import torch

from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.kernels.sampling.draft_starts import (
    DraftStarts,
    StartField,
    find_draft_starts,
    find_draft_starts_torch,
    find_draft_starts_triton,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RING = (12, 32)  # slots before it, places of a row
PADDING = (0, 0, 0, 0, 0, -1, -1)
MOST = 16  # counts


def starts(number: int) -> DraftStarts:
    return DraftStarts(*torch.full((4, MOST), -7, dtype=torch.int64, device=DEVICE)[:, :number])


def random_check(rows: int, K: int, is_behind: bool) -> tuple[torch.Tensor, CheckSources]:
    """Fields and sources of so many sequences and one row of padding. Drafts are 0 or 1, and so is what is drawn."""
    drafted = torch.randint(0, 2, (MOST, K))
    num_drafts = torch.randint(0, K + 1, (rows,))
    first_draws = (num_drafts + 1).cumsum(0)
    drawn = torch.randint(0, 2, (int(first_draws[-1]),))  # not one more than the last sequence's
    fields = torch.zeros(rows + 1, len(StartField) + 2 * K, dtype=torch.int64)
    fields[:, : len(StartField)] = torch.tensor(PADDING)
    fields[:, -K:] = -1
    numbers = fields[:rows]
    numbers[:, StartField.FIRST_DRAW] = first_draws - num_drafts - 1
    numbers[:, StartField.START] = torch.randint(1, 70, (rows,))
    numbers[:, StartField.NUM_DRAFTS] = num_drafts
    numbers[:, StartField.NUM_COVERED] = numbers[:, StartField.START] + torch.randint(1, 2 * K + 3, (rows,))
    numbers[:, StartField.NUM_PASSES] = K
    numbers[:, StartField.COUNTED_AT] = torch.randint(-1, MOST, (rows,)) if is_behind else -1
    numbers[:, StartField.RING_ROW] = torch.randint(-1, 6, (rows,))
    for row, number in zip(numbers, num_drafts.tolist(), strict=True):
        if torch.rand(()) < 0.5:
            row[len(StartField) + K :][:number] = torch.randint(0, drafted.numel(), (number,))
        else:
            row[len(StartField) :][:number] = torch.randint(0, 2, (number,))
    counted = torch.randint(0, K + 1, (MOST,))
    return fields.to(DEVICE), CheckSources(drawn.to(DEVICE), drafted.to(DEVICE), counted.to(DEVICE))


@pytest.mark.parametrize("K", range(1, 8))
@pytest.mark.parametrize("rows", [1, 5, 15])
@pytest.mark.parametrize("is_behind", [False, True])
def test_triton_finds_what_the_reference_does(rows: int, K: int, is_behind: bool) -> None:
    torch.manual_seed(100 * rows + K)
    fields, sources = random_check(rows, K, is_behind)
    theirs = sources._replace(num_accepted=sources.num_accepted.clone())
    ours, expected = starts(rows + 1), starts(rows + 1)
    find_draft_starts_triton(fields, sources, RING, ours)
    find_draft_starts_torch(fields, theirs, RING, expected)
    for each, other in zip((*ours, sources.num_accepted), (*expected, theirs.num_accepted), strict=True):
        assert torch.equal(each, other)
    padding = [each[-1].item() for each in ours]
    assert padding[1] >= padding[2] and padding[3] == -1, "a row of padding has nothing to draft"


@pytest.mark.parametrize("find", [find_draft_starts_torch, find_draft_starts_triton])
def test_sequences_begin_behind_their_right_drafts(find) -> None:
    """All of three drafts made on the device, one of two that the host knew, none that were made; the first two stand
    behind a check, in each other's rows."""
    sources = CheckSources(
        drawn=torch.tensor([2, 3, 4, 50, 6, 51, 52, 53], device=DEVICE),
        drafted=torch.tensor([[9, 9, 9], [2, 3, 4]], device=DEVICE),
        num_accepted=torch.tensor([1, 2, 3, 8], device=DEVICE),
    )
    fields = [
        (0, 14, 3, 64, 3, 1, 0, *(0, 0, 0), *(3, 4, 5)),
        (4, 30, 2, 35, 3, 0, 5, *(6, 7, 0), *(-1, -1, -1)),
        (7, 9, 0, 64, 2, -1, -1, *(0, 0, 0), *(-1, -1, -1)),
    ]
    found = starts(3)
    find(torch.tensor(fields, device=DEVICE), sources, RING, found)
    assert found.tokens.tolist() == [50, 51, 53]
    assert found.positions.tolist() == [14 + 2 + 4, 30 + 1 + 2, 9 + 1]
    assert found.ends.tolist() == [20 + 3, 35, 10 + 2]
    assert found.vectors.tolist() == [12 + 19, 12 + 5 * 32 + 0, -1]
    assert sources.num_accepted.tolist() == [3, 1, 0, 8]


def test_fields_and_starts_must_agree() -> None:
    none = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    sources = CheckSources(none, none.view(2, 2), none)
    with pytest.raises(ValueError, match="11 numbers each"):
        find_draft_starts(torch.zeros(2, 10, dtype=torch.int64, device=DEVICE), sources, RING, starts(2))


def test_an_h200_keeps_all_sequences_in_registers() -> None:
    pointers = ("fields", "drawn", "drafted", "num_accepted", "token", "position", "end", "vector")
    types = {f"{name}_ptr": "*i64:16" for name in pointers} | {"B": "i32", "num_slots": "i32"}
    constexprs = {"BLOCK_B": 256, "PLACES": 32, "NUM_FIELDS": len(StartField)}
    kernel = "headrace.kernels.sampling.draft_starts:_draft_starts_kernel"
    launches = [Launch(kernel, types, constexprs | {"K": K, "BLOCK_T": T}, num_warps=8) for K, T in ((3, 4), (7, 8))]
    assert [report.stack_bytes for report in compile_for_h200(launches)] == [0, 0]
