"""Chunks of packed sequences and their tables."""

import torch

from headrace.kernels.lib.chunks import Chunk, ChunkTable, cut


def test_chunks_end_where_states_are_written():
    chunks = cut(first_row=10, num_rows=300, writes=[(300, 7), (16, 5), (144, 6)], size=128)
    assert chunks == [
        Chunk(10, 16, 5),
        Chunk(26, 128, 6),
        Chunk(154, 128, None),
        Chunk(282, 28, 7),
    ]


def test_aligned_writes_cost_no_further_chunk():
    writes = [(row, row // 512) for row in range(512, 32769, 512)]
    assert len(cut(0, 32768, writes, 128)) == len(cut(0, 32768, writes[-1:], 128)) == 256


def test_rows_after_the_last_write_are_chunks_too():
    assert cut(0, 70, [(64, 3)], 64) == [Chunk(0, 64, 3), Chunk(64, 6, None)]
    assert cut(5, 64, [], 64) == [Chunk(5, 64, None)]


def test_a_row_with_two_writes_has_a_chunk_of_no_rows():
    assert cut(0, 64, [(64, 3), (64, 2)], 64) == [Chunk(0, 64, 2), Chunk(64, 0, 3)]


def test_tables_begin_at_multiples_of_16_bytes():
    chunks = [[Chunk(0, 64, None), Chunk(64, 3, 9)], [Chunk(67, 1, 4)]]
    table = ChunkTable.build(chunks, [None, 5], torch.device("cpu"))
    assert table.chunks_C4.tolist() == [[0, 64, -1, 0], [64, 3, 9, 0], [67, 1, 4, 0]]
    assert table.sequences_N4.tolist() == [[0, 2, -1, 0], [2, 3, 5, 0]]
    assert table.sequences_N4.data_ptr() % 16 == 0
