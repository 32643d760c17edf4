"""The model's head as the layer that drafts reads it: in FP8 where such products run, perhaps of some tokens alone.

What it says is checked by the model: a token without a row is never drafted, and comes with the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.lib.sizes import cdiv


class DraftHead:
    """`ids` int64 [N]: the token of each row; None: all tokens, in order.

    Rows change in place, between launches: captured passes read them. A head that is packed, as in float32 on a CPU,
    has no such rows: it stays whole.
    """

    def __init__(self, head: LinearWeight, num_rows: int = 0) -> None:
        """`num_rows`: of the tokens with the lowest ids, if that is less than all, and a multiple of 16 as products in
        FP8 ask for; 0: all."""
        self._head = head
        self.ids: Tensor | None = None
        rows, num_rows = head, 16 * cdiv(num_rows, 16)
        if 0 < num_rows < head.out_features and not head.is_packed:
            self.ids = torch.arange(num_rows, device=head.device)
            rows = LinearWeight(head.rows(self.ids))
        self._rows = rows.in_fp8()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Scores [M, N] of vectors [M, hidden]."""
        return self._rows(hidden)

    def replace(self, rows: Tensor, tokens: Tensor) -> None:
        """Has rows int64 [n] of N stand for these tokens int64 [n] from now on, behind all that was launched.

        Where the device has too little memory for that nothing has changed.
        """
        assert self.ids is not None
        self._rows.replace_rows(rows, self._head.rows(tokens))
        self.ids.index_copy_(0, rows, tokens)
