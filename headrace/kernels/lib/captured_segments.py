"""The tables of packed sequences for captured passes: they stay where they are, and are filled anew for each replay.

Grids follow from the tables' sizes, so those are what a pass may need at most. What is left over costs programs that
end at once: sequences and tiles of no rows, chunks of -1.

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
    """To the host it is one sequence of all the rows, fresh and forgotten; to the kernels what `fill` said last.

    A table comes into being when a kernel first asks for it: before its pass is captured, in the run that compiles it.
    """

    def __init__(self, num_rows: int, most_sequences: int, most_writes: int, ints: StaticInts, device: torch.device):
        """The tables are taken from `ints`. Of the sequences, those of no rows count, too."""
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
        """On the host: `upload` of the ints brings it to the device.

        lengths          of at most N sequences, all rows together
        writes_of_each   (rows of the sequence before it, slot), at most W together; of all sequences with rows but
                         one, a state is written behind the last row
        """
        if sum(lengths) != self.lengths[0] or len(lengths) > self._most_sequences:
            raise ValueError(f"{len(lengths)} sequences of {sum(lengths)} rows: room is for {self._most_sequences} of "
                             f"{self.lengths[0]}")  # fmt: skip
        if sum(map(len, writes_of_each)) > self._most_writes:
            raise ValueError(f"{sum(map(len, writes_of_each))} states to write: room is for {self._most_writes}")
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
        rows, nothings = table_rows(chunks, src_slots), ([0, -1, -1, 0], [0, 0, -1, 0])
        for table, values, nothing in zip(self._host_chunks[size], rows, nothings, strict=True):
            _set(table, values, nothing)

    def _fill_conv(self, taps: int, tile_rows: int) -> None:
        rows = conv_rows(*self._filled, taps, tile_rows)
        # A tile of no rows still looks back at those before it: it stands where there are some.
        nothings = [0, 0, -1, 0, 0], [taps - 1, 0], [0, 0]
        for table, values, nothing in zip(self._host_conv[taps, tile_rows], rows, nothings, strict=True):
            _set(table, values, nothing)


def _set(table: np.ndarray, values: Sequence[int], nothing: Sequence[int]) -> None:
    """The table's first rows are `values`, all further ones `nothing`."""
    rows = np.asarray(values, dtype=np.int32).reshape(-1, table.shape[1])
    table[: len(rows)], table[len(rows) :] = rows, nothing
