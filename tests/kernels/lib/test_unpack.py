"""Packed pieces in Triton against the reference, at any width, number and address, by one compiled kernel."""

import pytest
import torch

from headrace.kernels.lib.unpack import TILE, unpack, unpack_torch, unpack_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [
    ((8, 1), (1, 6), (1, 3)),
    ((8, 3), (3, 6), (3, 17)),
    ((8, 256), (256, 6), (255, 41)),
    ((4, 5), (3, 700)),
    ((1, 9), (0, 7), (2, 0)),
    ((2, TILE),),
    ((0, 3),),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.int32,) * 4, (torch.int64,) * 4, (torch.int64, torch.int64, torch.int32, torch.int32)],
    ids=["32 bits", "64 bits", "both"],
)
def test_each_piece_goes_to_its_rows_and_nothing_else_is_written(
    shapes: tuple[tuple[int, int], ...], dtypes: tuple[torch.dtype, ...], first: int
) -> None:
    count = sum(rows * width for rows, width in shapes)
    packed = torch.randint(-(2**31), 2**31, (first + count,), dtype=dtypes[0], device=DEVICE)[first:]
    found = []
    for copy in (unpack_triton, unpack_torch, unpack):
        around = [
            torch.full((rows + 2, width + 5), -7, dtype=dtype, device=DEVICE)
            for (rows, width), dtype in zip(shapes, dtypes[1:], strict=False)
        ]
        copy(packed, *[each[1:-1, first : each.shape[1] - 5 + first] for each in around])
        found.append(around)
    ours, *others = found
    for theirs in others:
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert torch.equal(torch.cat([each[1:-1, first : each.shape[1] - 5 + first].flatten() for each in ours]), packed)


def test_pieces_that_are_not_the_whole_buffer_are_refused() -> None:
    packed, out = torch.zeros(12, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    for wrong in ((out[:2],), (out, out), (out.T,), (out.view(-1),), (out.float(),), (), (out, *[out[:0]] * 3)):
        with pytest.raises(ValueError, match="pieces"):
            unpack(packed, *wrong)


@pytest.mark.parametrize("bits", [32, 64])
def test_it_compiles_without_a_stack(bits: int) -> None:
    types = {"packed_ptr": f"*i{bits}", "a_ptr": f"*i{bits}", "b_ptr": "*i32", "c_ptr": "*i32"}
    types |= {f"{number}_{piece}": "i32" for number in ("end", "width", "stride") for piece in "abc"}
    kernel = "headrace.kernels.lib.unpack:_unpack_kernel"
    [report] = compile_for_h200([Launch(kernel, types, {"TILE": TILE})])
    assert report.stack_bytes == 0 and report.registers <= 64
    assert report.accesses("ld.global") == [f"b{bits}"]
