"""Vectors of last tokens in Triton against the reference: from states, from the ring, and none."""

import pytest
import torch

from headrace.kernels.sampling.last_vectors import (
    read_last_vectors,
    read_last_vectors_torch,
    read_last_vectors_triton,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, RING_PLACES = 6, 10


@pytest.mark.parametrize("read", [read_last_vectors_torch, read_last_vectors_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 40, 1027])
def test_vectors_come_from_where_they_lie(read, dtype: torch.dtype, width: int) -> None:
    """The pool has another layer's part between its slots; all that is not asked for is NaN."""
    torch.manual_seed(width)
    pool = torch.full((SLOTS, 2, width), torch.nan, dtype=dtype, device=DEVICE)[:, 1]
    ring = torch.full((RING_PLACES, width), torch.nan, dtype=dtype, device=DEVICE)
    out = torch.full((8, width), torch.nan, dtype=dtype, device=DEVICE)
    places = [SLOTS - 1, SLOTS, -1, 2, SLOTS + RING_PLACES - 1, 2, -1]
    vectors = torch.randn(SLOTS + RING_PLACES, width).to(dtype).to(DEVICE)
    for place in {*places} - {-1}:
        (pool if place < SLOTS else ring)[place if place < SLOTS else place - SLOTS] = vectors[place]
    read(torch.tensor(places, device=DEVICE), pool, ring, out[: len(places)])
    for row, place in zip(out, places, strict=False):
        assert torch.equal(row, torch.zeros_like(row) if place < 0 else vectors[place])
    assert out[-1].isnan().all()


def test_shapes_must_agree() -> None:
    pool, places = torch.zeros(3, 8, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="disagree"):
        read_last_vectors(places, pool, pool.bfloat16(), torch.zeros(2, 8, device=DEVICE))


def test_an_h200_moves_sixteen_bytes_at_a_time() -> None:
    types = {name: "*bf16:16" for name in ("pool_ptr", "ring_ptr", "out_ptr")}
    types |= {"place_ptr": "*i64:16", "stride_pool": "i32:16", "num_slots": "i32"}
    kernel = "headrace.kernels.sampling.last_vectors:_last_vectors_kernel"
    [report] = compile_for_h200([Launch(kernel, types, {"D": 2560, "BLOCK_D": 1024}, num_warps=4)])
    assert "v4.b32" in report.accesses("ld.global") and report.accesses("st.global") == ["v4.b32"]
