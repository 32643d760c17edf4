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

from dataclasses import dataclass
from enum import IntEnum

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
    WRITTEN = 5  # tokens after the base that the state to write has behind it: at most KEPT + rows_each, 0 without one


@dataclass(frozen=True)
class Tails:
    """The tails of B sequences in a step of `rows_each` rows of each: a token and its drafts; 0 only writes states."""

    fields: Tensor
    rows_each: int

    def column(self, field: TailField) -> Tensor:
        """[B] int64."""
        return self.fields[:, field].long()

    @property
    def source(self) -> StateSource:
        """The states at the bases."""
        return StateSource(self.column(TailField.SRC), any_fresh=True)

    @property
    def rows(self) -> Tensor:
        """[B, rows_each] int64: of each of the step's rows, the tokens after the base before it."""
        return self.column(TailField.KEPT)[:, None] + torch.arange(self.rows_each, device=self.fields.device)


def most_kept(num_places: int) -> int:
    """The most entries of a row that a step finds."""
    return num_places // 2 - 1
