"""Tails: what has come after a running sequence's last written state, kept as inputs instead of as states.

A sequence's state rests in a slot at its base. The inputs of the tokens since then lie in a ring, which has a row for
each running sequence. A decode step reads the state and the ring, adds entries for its own rows, and writes a state now
and then (headrace/cache/tails.py says when): a state is read once a step and written once in many. Drafts that are
rejected leave no trace, because later tokens overwrite their entries.

    entry of the token at position n    place n % places of the sequence's row

Shapes    fields [B, 6] int32, contiguous, a column for each `TailField`; a ring [rows, places, ...], contiguous
Contract  KEPT is less than half of places, and rows_each at most half. Rows and destinations of a batch are unique; a
          destination may be its own sequence's source, and no other's. Of a row of -1, that of a captured graph's
          padding, nothing is read or written
Source    Mamba2 and the delta rule by replayed inputs: ReplaySSM. The state that is written at an end of a block, and
          is a checkpoint then, is ours
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from headrace.kernels.lib.segments import StateSource


class TailField(IntEnum):
    """The numbers by which a kernel knows a sequence's tail."""

    SRC = 0  # slot of the state at the base; -1: a state of zeros
    DST = 1  # slot of the state to write; -1: none
    ROW = 2  # of the ring
    START = 3  # place of the first token after the base
    KEPT = 4  # tokens after the base that the ring holds
    WRITTEN = 5  # tokens after the base that the state to write has behind it, 1 to KEPT + rows_each; 0 without one


@dataclass(frozen=True)
class Tails:
    """The tails of B sequences in a step of `rows_each` rows of each: a token and its drafts; 0 only writes states."""

    fields: Tensor
    rows_each: int

    def column(self, field: TailField) -> Tensor:
        """[B] int64."""
        return self.fields[:, field].long()

    @cached_property
    def source(self) -> StateSource:
        """The states at the bases, for torch's forms. Waits for the device."""
        slots = self.column(TailField.SRC)
        return StateSource(slots, any_fresh=bool((slots < 0).any()))

    @cached_property
    def entries(self) -> TailEntries:
        """For torch's forms, as the fields are now. Waits for the device."""
        return TailEntries(self)


class TailEntries:
    """The places of a step's entries in the rings, its own among them: found once for all layers, for torch's forms.

    B sequences have E entries at most, B * rows_each of them are of the step.

    num       E
    num_kept  entries of the one that has most before the step: E - rows_each
    written   the states to write; None: there are none
    """

    def __init__(self, tails: Tails) -> None:
        self._rows_each = T = tails.rows_each
        row, start, kept = (tails.column(field) for field in (TailField.ROW, TailField.START, TailField.KEPT))
        kept = kept.masked_fill(row < 0, 0)
        fewest, most = (int(number) for number in kept.aminmax())
        self.num_kept, self.num = most, most + T
        E = self.num
        token, own = torch.arange(E, device=row.device), kept[:, None] + torch.arange(T, device=row.device)
        self._row, self._place = row.clamp(min=0)[:, None], start[:, None] + token
        self._live = None if bool((row >= 0).all()) else (row >= 0).nonzero()[:, 0]
        is_even = fewest == most and self._live is None
        self._is_missing = None if is_even else token >= (kept + T).masked_fill(row < 0, 0)[:, None]
        self._is_own = None if is_even else token[:most] >= kept[:, None]
        self._own = slice(most, E) if is_even else own
        # Behind a step's last row all entries are zero.
        self._is_later = token > own[..., None] if T > 1 else None
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
        self.written = WrittenStates.of(tails, E)

    def read(self, ring: Tensor) -> Tensor:
        """[B, E, ...] of ring [rows, places, ...], with zeros behind those that are there."""
        index, _ = self._index(ring.shape[1])
        return _found(ring, index, self._is_missing)

    def read_kept(self, ring: Tensor) -> Tensor:
        """As `read`, of those before the step alone: [B, num_kept, ...]."""
        index, _ = self._index(ring.shape[1])
        return _found(ring, index[:, : self.num_kept], self._is_own)

    def write(self, ring: Tensor, new: Tensor) -> None:
        """Writes the step's entries new [B * rows_each, ...]; of rows of -1 none."""
        _, index = self._index(ring.shape[1])
        if self._live is not None:
            new = new.unflatten(0, (-1, self._rows_each))[self._live].flatten(0, 1)
        ring.flatten(0, 1).index_copy_(0, index, new.to(ring.dtype))

    def own(self, x: Tensor) -> Tensor:
        """The step's rows [B, rows_each, ...] of x [B, E, ...]."""
        if isinstance(self._own, slice):
            return x[:, self._own]
        return x[torch.arange(len(x), device=x.device)[:, None], self._own]

    def decays(self, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """Decays up to each of the step's rows, by tokens' log decays [B, E, H]: of the state at the base
        [B, rows_each, H], and of each entry [B, rows_each, E, H], 0 of those that come later."""
        upto = log_decay.cumsum(1)
        at = self.own(upto)
        since = at[:, :, None] - upto[:, None]
        if self._is_later is not None:
            since.masked_fill_(self._is_later[..., None], -torch.inf)
        return at.exp(), since.exp_()

    def _index(self, num_places: int) -> tuple[Tensor, Tensor]:
        """Places in a flat ring: of all entries [B, E], and of the step's own, one after the other."""
        if num_places not in self._places:
            places = self._row * num_places + self._place % num_places
            own = self.own(places) if self._live is None else self.own(places)[self._live]
            self._places[num_places] = places, own.flatten()
        return self._places[num_places]


def _found(ring: Tensor, index: Tensor, is_missing: Tensor | None) -> Tensor:
    found = ring.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)
    if is_missing is None:
        return found
    # Not a product with zero: what nobody has written may be NaN.
    return found.masked_fill_(is_missing.view(*index.shape, *[1] * (ring.dim() - 2)), 0)


@dataclass(frozen=True)
class WrittenStates:
    """The W sequences whose states a step writes.

    sequences   [W] int64, places in the batch
    slots       [W] int64, the destinations
    last        [W] int64, of each the last entry before its state
    is_behind   [W, E], entries that are not before it
    """

    sequences: Tensor
    slots: Tensor
    last: Tensor
    is_behind: Tensor

    @staticmethod
    def of(tails: Tails, num_entries: int) -> WrittenStates | None:
        dst = tails.column(TailField.DST)
        sequences = ((dst >= 0) & (tails.column(TailField.ROW) >= 0)).nonzero()[:, 0]
        if not len(sequences):
            return None
        last = tails.column(TailField.WRITTEN)[sequences] - 1
        token = torch.arange(num_entries, device=dst.device)
        return WrittenStates(sequences, dst[sequences], last, token > last[:, None])

    def decays(self, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """Decays up to the written states, by tokens' log decays [B, E, H]: of the states at the bases [W, H], and of
        each entry [W, E, H], 0 of those behind."""
        upto = log_decay[self.sequences].cumsum(1)
        at = upto[torch.arange(len(upto), device=upto.device), self.last]
        since = (at[:, None] - upto).masked_fill_(self.is_behind[..., None], -torch.inf)
        return at.exp(), since.exp_()

    def write(self, pool: Tensor, states: Tensor) -> None:
        """Writes states [W, ...] to pool [S, ...]."""
        pool.index_copy_(0, self.slots, states.to(pool.dtype))


def most_kept(num_places: int) -> int:
    """The most entries of a row that a step finds."""
    return num_places // 2 - 1
