"""Ids on their way to the device, through memory of their own or through pinned buffers that are used again."""

import pytest
import torch

from headrace.forward.upload import PinnedIds, upload_ids

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("with_pinned_ids", [False, True])
def test_ids_arrive_whatever_their_number_was_before(with_pinned_ids):
    pinned_ids = PinnedIds(DEVICE) if with_pinned_ids else None
    for ids in ([3], [5, 0, 9], [1, 2], [], list(range(10)) * 200, [4, 4, 7]):
        uploaded = upload_ids(ids, 10, "block", DEVICE, pinned_ids)
        assert uploaded.dtype == torch.int64 and uploaded.device.type == DEVICE.type
        assert uploaded.tolist() == ids


def test_pinned_buffers_are_used_again():
    pinned_ids = PinnedIds(DEVICE)
    first = upload_ids([1, 2, 3], 10, "block", DEVICE, pinned_ids).data_ptr()
    assert upload_ids([4, 5], 10, "block", DEVICE, pinned_ids).data_ptr() == first
    assert upload_ids([6, 7, 8], 10, "block", DEVICE, pinned_ids).data_ptr() == first


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 40])
@pytest.mark.parametrize("with_pinned_ids", [False, True])
def test_an_id_out_of_range_is_named_and_goes_nowhere(wrong, with_pinned_ids):
    pinned_ids = PinnedIds(DEVICE) if with_pinned_ids else None
    with pytest.raises(IndexError, match=rf"block {wrong} is not in 0\.\.9"):
        upload_ids([1, wrong, 2], 10, "block", DEVICE, pinned_ids)
