"""Rows [V] on the device that running sequences own: one tensor, which grows with the most rows in use at a time."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch import Tensor


class SequenceRows:
    """A row [V] for each of some sequences; `_row_of` names it, `values` holds all of them.

    A row takes 4 bytes a token of the vocabulary: 0.95 MiB of 248,320. Only running sequences have one, each of which
    also has a slot, with a state of tens of MiB. Memory grows with the most rows in use at a time, in powers of two.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(0, vocab_size, dtype=dtype, device=device)
        self._rows: dict[Hashable, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._rows)

    def keep_only(self, owners: Collection[Hashable]) -> None:
        """Frees the rows of all others."""
        if self._rows:
            kept = set(owners)
            self._rows = {owner: row for owner, row in self._rows.items() if owner in kept}

    def _row_of(self, owner: Hashable) -> tuple[int, Tensor | None]:
        """The owner's row, and its values [V] if it is new: the caller fills them."""
        row = self._rows.get(owner)
        if row is not None:
            return row, None
        used = set(self._rows.values())
        row = next(number for number in range(len(used) + 1) if number not in used)
        if row == len(self.values):
            grown = self.values.new_empty(max(1, 2 * row), self.values.shape[1])
            grown[:row] = self.values
            self.values = grown
        self._rows[owner] = row
        return row, self.values[row]
