"""Chunks of packed sequences for the GPU's chunked scans.

A sequence is cut after every row whose state is written, and every `size` rows in between: each state to write is then
the state after some chunk, whatever its row, and costs only its write. A row with several writes has a chunk of no rows
for each further one.

Legend: N sequences, C chunks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.lib.upload import upload_lists


class Chunk(NamedTuple):
    first_row: int  # among the packed rows
    num_rows: int
    write_slot: int | None  # for the state after the chunk


@dataclass(frozen=True)
class ChunkTable:
    """Chunks and sequences on the device: rows of four numbers, which kernels load at once."""

    chunks_C4: Tensor  # int32: first row, number of rows (-1: unused), slot to write or -1, 0
    sequences_N4: Tensor  # int32: first chunk, first chunk of the next sequence, slot to read or -1, 0

    @classmethod
    def build(
        cls, chunks_N: Sequence[Sequence[Chunk]], src_slots: Sequence[int | None], device: torch.device
    ) -> "ChunkTable":
        chunks_C4, sequences_N4 = upload_lists(table_rows(chunks_N, src_slots), device, torch.int32)
        return cls(chunks_C4.view(-1, 4), sequences_N4.view(-1, 4))


def table_rows(chunks_N: Sequence[Sequence[Chunk]], src_slots: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Both tables, flattened, for the chunks of each sequence."""
    chunks: list[int] = []
    sequences: list[int] = []
    for of_sequence, src_slot in zip(chunks_N, src_slots, strict=True):
        first = len(chunks) // 4
        for chunk in of_sequence:
            chunks += [chunk.first_row, chunk.num_rows, -1 if chunk.write_slot is None else chunk.write_slot, 0]
        sequences += [first, len(chunks) // 4, -1 if src_slot is None else src_slot, 0]
    return chunks, sequences


def cut(first_row: int, num_rows: int, writes: Sequence[tuple[int, int]], size: int) -> list[Chunk]:
    """The chunks of one sequence; writes are (rows of the sequence before it, slot), in any order."""
    chunks: list[Chunk] = []
    done = 0

    def advance(until: int, write_slot: int | None) -> None:
        nonlocal done
        while until - done > size:
            chunks.append(Chunk(first_row + done, size, None))
            done += size
        chunks.append(Chunk(first_row + done, until - done, write_slot))
        done = until

    for row, slot in sorted(writes):
        advance(row, slot)
    if done < num_rows:
        advance(num_rows, None)
    return chunks
