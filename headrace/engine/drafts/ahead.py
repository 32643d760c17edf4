"""Drafts made ahead: the MTP layer's passes behind a step whose tokens the host does not know yet, mostly a check.

How many of the check's drafts are accepted says where the next ones begin. A captured pass finds that on the device, so
that the layer drafts, and the next check follows, while the host takes the tokens and accounts for them.

Legend    B sequences of a captured size, T tokens of each in a check at most, K = T - 1 drafts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from headrace.engine.graphs.decode_inputs import PAD_SLOT
from headrace.engine.sampling.logprobs import recorded, to_host
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.kernels.sampling.draft_starts import DraftStarts, StartField, find_draft_starts


class CheckedSequence(NamedTuple):
    """One sequence that decodes in a launched step, with drafts or without. A tuple, as a step makes one for each.

    entry         its part of the step
    first_draw    index of the draw behind its newest token; those behind its drafts follow
    num_covered   tokens that its blocks cover: no pass goes beyond
    """

    entry: SequenceInput
    first_draw: int
    num_covered: int

    @property
    def block_ids(self) -> Sequence[int]:
        return self.entry.block_ids


class DraftsAhead:
    """The layer's drafts of some sequences, on their way to the host; row i of `ids` [rows, K] has the i-th one's."""

    def __init__(self, ids: Tensor, starts: Sequence[CheckedSequence]) -> None:
        """`ids` int64 may be overwritten by the next passes."""
        self.num_covered = [start.num_covered for start in starts]
        self.num_passes = ids.shape[1]
        self._on_host = to_host(ids)
        self.arrived = recorded(ids.device, is_timed=True)
        self._known: list[list[int]] | None = None

    @property
    def has_arrived(self) -> bool:
        """True if the device is done with the passes."""
        return self.arrived is None or self.arrived.query()

    def ids(self) -> list[list[int]]:
        """The drafts of each row. Waits for them."""
        if self._known is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self._known = self._on_host.tolist()
        return self._known


class FutureDrafts(Sequence[int]):
    """The first drafts of a row of `DraftsAhead`: their number is known, and whoever asks for a value waits for it."""

    def __init__(self, made: DraftsAhead, row: int, number: int) -> None:
        self.made = made
        self.row = row
        self._number = number

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, int):
            return self._values()[place]
        start, stop, stride = place.indices(self._number)
        if (start, stride) == (0, 1):
            return FutureDrafts(self.made, self.row, max(0, stop))
        return self._values()[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values())

    def _values(self) -> list[int]:
        return self.made.ids()[self.row][: self._number]


class CheckedStarts:
    """Inputs of the captured pass that finds where drafts begin: tensors at fixed addresses, filled by one kernel.

    A sequence in the launched step may have no drafts. It may also stand behind the check before: then its place
    depends on how many drafts that check accepted, which this pass counted at the time.
    """

    def __init__(self, sources: CheckSources, memory: CacheMemory) -> None:
        """`sources`: the tokens of the last launch, the drafts that it may have been about, and where the number of
        accepted ones is kept."""
        self._sources = sources
        self._ring = memory.num_slots, memory.tail_places
        most, K = sources.drafted.shape
        padding = np.zeros(len(StartField) + 2 * K, dtype=np.int64)  # numbers, drafts, and places in `drafted`, or -1
        padding[[StartField.COUNTED_AT, StartField.RING_ROW]] = padding[-K:] = PAD_SLOT
        self._padding = padding
        self._fields = torch.from_numpy(padding).to(memory.device).repeat(most, 1)

    def packed(self, starts: Sequence[CheckedSequence], size: int, num_passes: int) -> np.ndarray:
        """[size, F], for `fields`."""
        n, N, K = len(starts), len(StartField), self._sources.drafted.shape[1]
        rows = np.tile(self._padding, (size, 1))
        numbers, future = [], []
        for row, (entry, first_draw, num_covered) in enumerate(starts):
            tail, behind, num_drafts = entry.tail, entry.behind, len(entry.tokens) - 1
            assert tail is not None, "a model with an MTP layer keeps tails"
            counted_at = PAD_SLOT if behind is None else behind.row
            # In the order of `StartField`.
            numbers.append((first_draw, entry.start, num_drafts, num_covered, num_passes, counted_at, tail.row))
            future.append(PAD_SLOT if entry.future_drafts is None else entry.future_drafts)
            if num_drafts and entry.future_drafts is None:
                rows[row, N : N + num_drafts] = entry.tokens[1:]
        rows[:n, :N] = np.array(numbers, dtype=np.int64).reshape(n, N)
        future_rows = np.array(future, dtype=np.int64)
        place = np.arange(K)
        is_future = (future_rows >= 0)[:, None] & (place < rows[:n, StartField.NUM_DRAFTS, None])
        rows[:n, N + K :] = np.where(is_future, future_rows[:, None] * K + place, PAD_SLOT)
        return rows

    def fields(self, size: int) -> Tensor:
        """The inputs of so many sequences, [size, F], where what `packed` returns goes."""
        return self._fields[:size]

    def find(self, starts: DraftStarts) -> None:
        """Writes to `starts` where the drafts of the first loaded sequences begin, as many as it has rows.

        Counts the accepted drafts of each in `num_accepted`, for the next check.
        """
        find_draft_starts(self._fields[: len(starts.tokens)], self._sources, self._ring, starts)
