"""Logits as the head leaves them, until somebody needs them in float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels.sampling.widen import widened


@dataclass(frozen=True)
class Logits:
    """The rows of a head's product, rounded to the model's dtype: logits are these, divided in float32.

    The best of a row's logits is the best of the row, so a greedy draw needs no float32. Of 16 bits the first best is
    the same, too, as a division keeps distinct values distinct; in float32 it may round neighbours to one logit, and
    the first best of the row need not be the first of these.

    rows      [N, V] in the model's dtype
    divisor   above 0: configs with another are refused
    """

    rows: Tensor
    divisor: float

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Tensor) -> Logits:
        """The rows of `index`, int64 [K], in its order."""
        return Logits(self.rows.index_select(0, index), self.divisor)

    def in_float32(self, index: Tensor | None = None) -> Tensor:
        """[N, V], or [K, V] of the rows of `index`, int64 [K]: a tensor of its own."""
        return widened(self.rows, self.divisor, index)
