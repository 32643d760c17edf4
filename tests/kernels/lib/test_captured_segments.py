"""Tables of captured passes: their unused entries cost programs that have nothing to do."""

import torch

from headrace.kernels.lib.captured_segments import CapturedSegments
from headrace.kernels.lib.upload import StaticInts

CPU = torch.device("cpu")


def test_unused_sequences_have_no_chunks_and_no_rows() -> None:
    """A kernel that reads one chunk ahead, or a sequence's range of chunks, stays within the tables."""
    ints = StaticInts(1024, CPU)
    segments = CapturedSegments(32, 4, 2, ints, CPU)
    chunks, conv = segments.chunk_table(16), segments.conv_table(4, 16)
    segments.fill([20, 12], [None, 3], [[(20, 5)], []])
    ints.upload()
    assert chunks.sequences_N4.tolist() == [[0, 2, -1, 0], [2, 3, 3, 0], [0, 0, -1, 0], [0, 0, -1, 0]]
    assert chunks.chunks_C4.tolist() == [[0, 16, -1, 0], [16, 4, 5, 0], [20, 12, -1, 0], *[[0, -1, -1, 0]] * 2]
    assert conv.sequences_N5[2:].tolist() == [[0, 0, -1, 0, 0]] * 2
