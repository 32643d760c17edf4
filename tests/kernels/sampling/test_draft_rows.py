"""Rows of draft passes in Triton against the reference, and against plain arithmetic."""

import pytest
import torch

from headrace.kernels.sampling.draft_rows import next_draft_rows, next_draft_rows_torch, next_draft_rows_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (16, 99)  # tokens of a block, the scratch block


@pytest.mark.parametrize("rows", [1, 5, 32, 67])
def test_triton_makes_the_rows_of_each_pass_as_the_reference_does(rows: int) -> None:
    torch.manual_seed(rows)
    table = torch.randint(0, 50, (rows, 9), dtype=torch.int32, device=DEVICE)[:, :6]
    ends = torch.randint(0, 6 * 16 + 1, (rows,), device=DEVICE)
    ours = (ends - torch.randint(-2, 4, (rows,), device=DEVICE)).clamp(min=0)
    theirs = ours.clone()
    for _ in range(3):
        found = next_draft_rows_triton(ours, ends, table, SIZES)
        for each, expected in zip(found, next_draft_rows_torch(theirs, ends, table, SIZES), strict=True):
            assert each.dtype == expected.dtype and torch.equal(each, expected)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("next_rows", [next_draft_rows_torch, next_draft_rows_triton])
def test_a_sequence_sees_nothing_behind_its_last_draft(next_rows) -> None:
    """One goes on in its next block, one has a draft left, one none, and the last is padding."""
    positions = torch.tensor([15, 31, 20, 0], device=DEVICE)
    ends = torch.tensor([18, 32, 20, 0], device=DEVICE)
    table = torch.tensor([[4, 5], [6, 7], [8, 9], [0, 0]], dtype=torch.int32, device=DEVICE)
    first = next_rows(positions, ends, table, SIZES)
    assert first.contexts.tolist() == [16, 32, 0, 0] and first.blocks.tolist() == [4, 7, 99, 99]
    assert first.positions.tolist() == [15, 31, 20, 0] and first.offsets.tolist() == [15, 15, 4, 0]
    second = next_rows(positions, ends, table, SIZES)
    assert second.contexts.tolist() == [17, 0, 0, 0] and second.blocks.tolist() == [5, 99, 99, 99]
    assert second.positions.tolist() == [16, 32, 21, 1] and second.offsets.tolist() == [0, 0, 5, 1]
    assert positions.tolist() == [17, 33, 22, 2]


def test_rows_must_agree() -> None:
    positions, table = torch.zeros(2, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="same rows"):
        next_draft_rows(positions, positions, table, sizes=SIZES)


def test_it_compiles_for_an_h200() -> None:
    types = {f"{name}_ptr": "*i64:16" for name in ("next", "end", "position", "block", "offset")}
    types |= {"table_ptr": "*i32:16", "context_ptr": "*i32:16"}
    types |= {"B": "i32", "stride_table": "i32:16", "scratch_block": "i32"}
    kernel = "headrace.kernels.sampling.draft_rows:_draft_rows_kernel"
    [report] = compile_for_h200([Launch(kernel, types, {"BLOCK_SIZE": 16, "BLOCK": 32}, num_warps=1)])
    assert report.stack_bytes == 0
