"""The penalties' kernel against its reference, on a GPU or in the interpreter."""

import pytest
import torch

from headrace.kernels.sampling.penalties import penalise, penalise_torch, penalise_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def inputs(V: int) -> tuple[torch.Tensor, ...]:
    """Logits of five rows, three of them penalised, with counts in rows 4, 0 and 2 of six; the others are poisoned."""
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(5, V, generator=generator)
    logits[:, 0] = -INF
    counts = torch.full((6, V), -(2**31), dtype=torch.int32)
    for row in (0, 2, 4):
        counts[row] = torch.randint(0, 7, (V,), generator=generator, dtype=torch.int32)
    settings = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.7, -0.3], [0.8, -0.1, 0.2]], dtype=torch.float64)
    return tuple(
        each.to(DEVICE) for each in (logits, counts, torch.tensor([3, 1, 0]), torch.tensor([4, 0, 2]), settings)
    )


@pytest.mark.parametrize("V", [1, 50, 64, 1000])
def test_the_kernel_changes_the_same_logits_by_the_same_amounts(V: int):
    logits, *rest = inputs(V)
    ours, expected = logits.clone(), logits.clone()
    penalise_triton(ours, *rest, block=64)
    penalise_torch(expected, *rest)
    torch.testing.assert_close(ours, expected, atol=0, rtol=2e-7)
    assert torch.equal(ours[[2, 4]], logits[[2, 4]])
    assert not torch.equal(ours, logits) or V == 1


def test_no_rows():
    logits, counts, *rest = inputs(8)
    before = logits.clone()
    penalise_triton(logits, counts, *(each[:0] for each in rest))
    assert torch.equal(logits, before)


def test_shapes_must_agree():
    logits, counts, rows, count_rows, settings = inputs(8)
    with pytest.raises(ValueError, match="disagree"):
        penalise(logits, counts, rows, count_rows[:2], settings)
    with pytest.raises(ValueError, match="disagree"):
        penalise(logits, counts.long(), rows, count_rows, settings)


def test_an_h200_reads_and_writes_sixteen_bytes_at_a_time():
    types = {"logits_ptr": "*fp32:16", "counts_ptr": "*i32:16", "rows_ptr": "*i64:16", "count_rows_ptr": "*i64:16"}
    types |= {"settings_ptr": "*fp64:16", "V": "i32:16", "stride_logits": "i32:16"}
    kernel = "headrace.kernels.sampling.penalties:_penalise_kernel"
    [report] = compile_for_h200([Launch(kernel, types, {"BLOCK": 2048})])
    assert "v4.b32" in report.accesses("ld.global") and "v4.b32" in report.accesses("st.global")
    assert report.stack_bytes == 0
