"""Uploads of host integers: their values, and addresses that Triton compiles one kernel for."""

import pytest
import torch

from headrace.kernels.lib.unpack import unpack
from headrace.kernels.lib.upload import PinnedBuffers, StaticInts, upload_lists, upload_values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_each_list_begins_at_a_multiple_of_16_bytes(dtype: torch.dtype):
    lists = [[1], [2, 3, 4], (), list(range(17)), (5, 6, 7, 8)]
    uploaded = upload_lists(lists, DEVICE, dtype)
    assert [tensor.tolist() for tensor in uploaded] == [list(values) for values in lists]
    assert all(tensor.dtype == dtype for tensor in uploaded)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in uploaded if len(tensor))


def test_values_may_be_nested_and_of_any_dtype():
    assert upload_values([[1, 2], [3, 4]], DEVICE).tolist() == [[1, 2], [3, 4]]
    assert upload_values([0.5], DEVICE, torch.float64).tolist() == [0.5]


def test_buffers_are_filled_again_only_behind_the_kernels_that_read_them():
    """On a GPU the host is far ahead of the device, whose work is long; on a CPU each is read at once."""
    on_gpu = DEVICE.type == "cuda"
    work = torch.randn(2048, 2048, device=DEVICE) if on_gpu else torch.zeros(1)
    buffers, seen = PinnedBuffers(DEVICE, torch.int32), torch.zeros(50, 4096, dtype=torch.int32, device=DEVICE)
    for n in range(50):
        work = work @ work if on_gpu else work
        with buffers.next(10 * (n + 1)) as packed:  # larger ones from time to time
            packed[:] = n
            unpack(packed, seen[n : n + 1, : len(packed)])
    expected = torch.zeros(50, 4096, dtype=torch.int32)
    for n in range(50):
        expected[n, : 10 * (n + 1)] = n
    assert torch.equal(seen.cpu(), expected)


def test_static_ints_keep_their_addresses_and_take_what_the_host_wrote():
    ints = StaticInts(12, DEVICE)
    (first, first_ints), (second, second_ints) = ints.take(3), ints.take(2, 2)
    addresses = first_ints.data_ptr(), second_ints.data_ptr()
    first[:], second[:] = [1, 2, 3], [[4, 5], [6, 7]]
    ints.upload()
    assert first_ints.tolist() == [1, 2, 3] and second_ints.tolist() == [[4, 5], [6, 7]]
    assert (first_ints.data_ptr(), second_ints.data_ptr()) == addresses
    assert (addresses[1] - addresses[0]) % 16 == 0


def test_more_ints_than_the_capacity_are_refused():
    ints = StaticInts(8, DEVICE)
    ints.take(5)
    with pytest.raises(ValueError, match="1 numbers more than the capacity of 8: 8 are taken"):
        ints.take(1)
