"""Staging copies, in torch and in Triton: bit for bit, and nothing else changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.transfer import gather_scatter
from headrace.kernels.transfer.gather_scatter import (
    gather_rows,
    gather_rows_torch,
    gather_rows_triton,
    scatter_rows,
    scatter_rows_torch,
    scatter_rows_triton,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROW_BYTES = [1, 6, 20, 24, 48, 4096, 8192 + 16, 65536]
ROWS = [5, 0, 7, 3]
implementations = pytest.mark.parametrize(
    "gather, scatter",
    [(gather_rows_torch, scatter_rows_torch), (gather_rows_triton, scatter_rows_triton)],
    ids=["torch", "triton"],
)
Copy = Callable[[Tensor, Tensor, Tensor], None]


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


@implementations
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("offset", [0, 8, 3], ids=lambda offset: f"staging at {offset}")
def test_rows_arrive_bit_by_bit_and_nothing_else_changes(gather: Copy, scatter: Copy, row_bytes: int, offset: int):
    pool, other = random_bytes(8, row_bytes), random_bytes(8, row_bytes)
    rows = torch.tensor(ROWS, device=DEVICE)
    buffer = random_bytes(offset + len(ROWS) * row_bytes + 5)
    edges = buffer[:offset].clone(), buffer[-5:].clone()
    staging = buffer[offset:-5]

    gather(pool, rows, staging)
    assert torch.equal(staging.view(len(ROWS), row_bytes), pool[ROWS])
    assert torch.equal(buffer[:offset], edges[0]) and torch.equal(buffer[-5:], edges[1])

    expected = other.clone()
    expected[ROWS] = pool[ROWS]
    scatter(other, rows, staging)
    assert torch.equal(other, expected)


@implementations
def test_no_rows_copy_nothing(gather: Copy, scatter: Copy):
    pool = random_bytes(3, 64)
    before, none = pool.clone(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    gather(pool, none, random_bytes(0))
    scatter(pool, none, random_bytes(0))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("copy", [gather_rows, scatter_rows])
def test_buffers_of_another_shape_are_refused(copy: Copy):
    rows = torch.tensor([1], device=DEVICE)
    with pytest.raises(ValueError, match=r"not \[64\] uint8"):
        copy(random_bytes(3, 64), rows, random_bytes(63))
    with pytest.raises(ValueError, match="contiguous"):
        copy(random_bytes(3, 128)[:, ::2], rows, random_bytes(64))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: more than four gigabytes of pool")
def test_offsets_are_not_32_bits_wide():
    pool = torch.zeros((5, 1 << 30), dtype=torch.uint8, device=DEVICE)
    pool[4] = 7
    staging = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    gather_rows(pool, torch.tensor([4], device=DEVICE), staging)
    assert (staging == 7).all()
    staging.fill_(9)
    scatter_rows(pool, torch.tensor([3], device=DEVICE), staging)
    assert (pool[3] == 9).all() and (pool[2] == 0).all()


@pytest.mark.parametrize("ids", [[], [3], [5, 0, 6, 1]], ids=str)
def test_staging_round_trip_is_bit_exact(ids: list[int]):
    pool = torch.randint(0, 256, (7, 33), dtype=torch.uint8)
    rows = torch.tensor(ids, dtype=torch.int64)
    staging = torch.zeros(len(ids) * 33, dtype=torch.uint8)
    gather_rows(pool, rows, staging)
    assert torch.equal(staging.view(-1, 33), pool[rows])
    other = torch.zeros_like(pool)
    scatter_rows(other, rows, staging)
    assert torch.equal(other[rows], pool[rows])
    untouched = [i for i in range(7) if i not in ids]
    assert not other[untouched].any()


def test_staging_of_the_wrong_size_is_refused():
    pool, rows = torch.zeros(7, 33, dtype=torch.uint8), torch.tensor([1, 2])
    for copy in (gather_rows, scatter_rows):
        with pytest.raises(ValueError, match=r"not \[66\] uint8"):
            copy(pool, rows, torch.zeros(65, dtype=torch.uint8))


@pytest.mark.parametrize("to_pool", [False, True], ids=["gather", "scatter"])
def test_rows_are_copied_in_words_of_sixteen_bytes(to_pool: bool):
    tile, num_warps = gather_scatter.launch_shape(65536 // 8)
    types = {"pool_ptr": "*i64:16", "rows_ptr": "*i64", "staging_ptr": "*i64:16"}
    sizes = {"WORDS_A_ROW": 65536 // 8, "TILE": tile, "TO_POOL": to_pool}
    kernel = "headrace.kernels.transfer.gather_scatter:_copy_rows_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, num_warps=num_warps)])
    assert report.accesses("st.global") == ["v2.b64"]
    assert report.accesses("ld.global") == ["v2.b64", "b64"]  # the words, and the row's number
    assert report.stack_bytes == report.shared_bytes == 0
    assert report.resident_warps == 64
