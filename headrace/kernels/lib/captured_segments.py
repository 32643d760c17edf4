"""Tables of packed sequences for captured passes: at fixed addresses, refilled before each replay.

Grids follow from the tables' sizes, so those are the most that a pass may need. Unused entries (sequences and tiles of
no rows, chunks of -1) cost programs that end at once.

Legend: N sequences, W state writes, R rows, C chunks, Z tiles
"""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.kernels.conv.table import ConvTable, conv_rows
from headrace.kernels.lib.chunks import ChunkTable, cut, table_rows
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.upload import StaticInts


class CapturedSegments(PrefillSegments):
    """Packed sequences whose tables can be refilled: host code sees one fresh sequence of all rows, without writes;
    kernels read the tables of the last `fill`.

    A table is made when a kernel first needs it: in the run that compiles the pass, before its capture.
    """

    def __init__(self, num_rows: int, most_sequences: int, most_writes: int, ints: StaticInts, device: torch.device):
        """The tables are taken from `ints`; `most_sequences` includes those of no rows."""
        super().__init__(**vars(PrefillSegments.build((num_rows,), (None,), (), device)))
        self._most_sequences, self._most_writes, self._ints = most_sequences, most_writes, ints
        self._host_chunks: dict[int, tuple[np.ndarray, ...]] = {}
        self._host_conv: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self.fill([num_rows], [None], [[]])

    def fill(
        self,
        lengths: Sequence[int],
        src_slots: Sequence[int | None],
        writes_of_each: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        """Refills all tables on the host; the ints' next `upload` copies them to the device.

        lengths          of at most N sequences, which sum to the rows of the pass
        writes_of_each   (rows of the sequence before it, slot), at most W in all; every sequence with rows, except
                         perhaps one, writes the state after its last row
        """
        if sum(lengths) != self.lengths[0] or len(lengths) > self._most_sequences:
            raise ValueError(
                f"{len(lengths)} sequences of {sum(lengths)} rows: capacity is {self._most_sequences} of "
                f"{self.lengths[0]}"
            )
        if sum(map(len, writes_of_each)) > self._most_writes:
            raise ValueError(f"{sum(map(len, writes_of_each))} states to write: capacity is {self._most_writes}")
        self._filled = lengths, src_slots, writes_of_each
        for size in self._host_chunks:
            self._fill_chunks(size)
        for taps, tile_rows in self._host_conv:
            self._fill_conv(taps, tile_rows)

    def chunk_table(self, size: int) -> ChunkTable:
        if size not in self.gpu_chunks:
            # Each write ends a stretch of rows, and one more stretch ends without.
            most_chunks = self.lengths[0] // size + self._most_writes + 1
            host_chunks, chunks_C4 = self._ints.take(most_chunks, 4)
            host_sequences, sequences_N4 = self._ints.take(self._most_sequences, 4)
            self.gpu_chunks[size] = ChunkTable(chunks_C4, sequences_N4)
            self._host_chunks[size] = host_chunks, host_sequences
            self._fill_chunks(size)
            self._ints.upload()
        return self.gpu_chunks[size]

    def conv_table(self, taps: int, tile_rows: int) -> ConvTable:
        key = taps, tile_rows
        if key not in self.conv_tables:
            host_sequences, sequences_N5 = self._ints.take(self._most_sequences, 5)
            host_tiles, tiles_Z2 = self._ints.take(self.lengths[0] // tile_rows + self._most_sequences, 2)
            host_writes, writes_W2 = self._ints.take(self._most_writes, 2)
            self.conv_tables[key] = ConvTable(sequences_N5, tiles_Z2, writes_W2)
            self._host_conv[key] = host_sequences, host_tiles, host_writes
            self._fill_conv(taps, tile_rows)
            self._ints.upload()
        return self.conv_tables[key]

    def _fill_chunks(self, size: int) -> None:
        lengths, src_slots, writes_of_each = self._filled
        first_rows = np.cumsum([0, *lengths]).tolist()
        chunks = [cut(*span, size) for span in zip(first_rows, lengths, writes_of_each, strict=False)]
        rows, unused = table_rows(chunks, src_slots), ([0, -1, -1, 0], [0, 0, -1, 0])
        for table, values, entry in zip(self._host_chunks[size], rows, unused, strict=True):
            _set(table, values, entry)

    def _fill_conv(self, taps: int, tile_rows: int) -> None:
        rows = conv_rows(*self._filled, taps, tile_rows)
        # A tile of no rows still reads the rows before it: it begins where there are some.
        unused = [0, 0, -1, 0, 0], [taps - 1, 0], [0, 0]
        for table, values, entry in zip(self._host_conv[taps, tile_rows], rows, unused, strict=True):
            _set(table, values, entry)


def _set(table: np.ndarray, values: Sequence[int], unused: Sequence[int]) -> None:
    """The table's first rows become `values`, all others `unused`."""
    rows = np.asarray(values, dtype=np.int32).reshape(-1, table.shape[1])
    table[: len(rows)], table[len(rows) :] = rows, unused
