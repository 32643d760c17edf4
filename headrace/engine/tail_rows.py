"""The rows of a node's rings: which are free. No torch."""

from __future__ import annotations


class TailRows:
    """Rows for `num_rows` decoding sequences, whose states are written every `interval` tokens."""

    def __init__(self, num_rows: int, interval: int) -> None:
        self.interval = interval
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row. Raises IndexError if there is none."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """The row may be taken again; its entries mean nothing any more."""
        self._free.append(row)
