"""Biases of sequences that ask for some, on the device: made once, and added to the logits of each draw."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from headrace.engine.sampling.sequence_rows import SequenceRows
from headrace.forward.upload import upload_ids
from headrace.kernels.lib.upload import upload_values
from headrace.request import Sampling


class TokenBiases(SequenceRows):
    """A row [V] of float32 for each sequence with biases: `logit_bias`, and -inf for tokens that never come.

    These are all that are not in `allowed_token_ids`, and bad words of one token.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, torch.float32, device)

    def row(self, owner: Hashable, sampling: Sampling) -> int:
        """The owner's row, filled if it is new."""
        row, fresh = self._row_of(owner)
        if fresh is not None:
            self._fill(fresh, sampling)
        return row

    def add(self, logits: Tensor, rows: list[int], bias_rows: list[int]) -> None:
        """Adds `values[bias_rows[k]]` to logits[rows[k]], float32 [N, V], for each k. Waits for nothing."""
        if logits.device.type == "cpu":
            # Gathered rows of more than a few MiB would be fresh pages each time.
            for row, bias_row in zip(rows, bias_rows, strict=True):
                logits[row] += self.values[bias_row]
            return
        device = logits.device
        biases = self.values.index_select(0, upload_values(bias_rows, device))
        logits.index_add_(0, upload_values(rows, device), biases)

    def _fill(self, fresh: Tensor, sampling: Sampling) -> None:
        def ids(values: tuple[int, ...]) -> Tensor:
            return upload_ids(values, len(fresh), "token", fresh.device)

        if sampling.allowed_token_ids:
            fresh.fill_(-torch.inf).index_fill_(0, ids(sampling.allowed_token_ids), 0.0)
        else:
            fresh.zero_()
        if sampling.bias_ids:
            values = upload_values(sampling.bias_values, fresh.device, torch.float32)
            fresh.index_add_(0, ids(sampling.bias_ids), values)
        if alone := tuple(word.tokens[0] for word in sampling.bad_words if len(word.tokens) == 1):
            fresh.index_fill_(0, ids(alone), -torch.inf)
