"""Work tables of the Triton prefill convolution: sequences, tiles of rows, windows to write.

A sequence's first K-1 rows read its source's window, and its windows may be written to that same slot: those rows and
all of a sequence's windows are one program's work. All other rows read rows only; they are cut into tiles without
regard to sequences.

Legend    N sequences, Z tiles, W window writes, K taps
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class ConvTable:
    sequences_N5: Tensor  # int32: first row, number of rows, slot to read or -1, first write, first write of the next
    tiles_Z2: Tensor  # int32: first row, number of rows (1 to tile_rows)
    writes_W2: Tensor  # int32: rows of the sequence before the window, slot

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        src_slots: Sequence[int | None],
        writes: Sequence[Sequence[tuple[int, int]]],
        taps: int,
        tile_rows: int,
        device: torch.device,
    ) -> "ConvTable":
        """`writes` of each sequence are (rows of the sequence before the window, slot)."""
        rows = conv_rows(lengths, src_slots, writes, taps, tile_rows)
        sequences_N5, tiles_Z2, writes_W2 = upload_lists(rows, device, torch.int32)
        return cls(sequences_N5.view(-1, 5), tiles_Z2.view(-1, 2), writes_W2.view(-1, 2))


def conv_rows(
    lengths: Sequence[int],
    src_slots: Sequence[int | None],
    writes: Sequence[Sequence[tuple[int, int]]],
    taps: int,
    tile_rows: int,
) -> tuple[list[int], list[int], list[int]]:
    """The three tables, flattened."""
    sequences: list[int] = []
    tiles: list[int] = []
    flat_writes: list[int] = []
    end = 0
    for length, src_slot, of_sequence in zip(lengths, src_slots, writes, strict=True):
        first, end = end, end + length
        first_write = len(flat_writes) // 2
        for num_rows, slot in of_sequence:
            flat_writes += [num_rows, slot]
        sequences += [first, length, -1 if src_slot is None else src_slot, first_write, len(flat_writes) // 2]
        for row in range(first + taps - 1, end, tile_rows):
            tiles += [row, min(tile_rows, end - row)]
    return sequences, tiles, flat_writes
