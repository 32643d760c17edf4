"""Logprobs: computed on the device when a step is launched, read when it is over.

They are those of the model itself, before penalties and temperature.

Legend    N rows, V ids, K alternatives
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.lib.upload import upload_values
from headrace.request import Alternative, Logprobs, PromptLogprobs

LOGITS_BYTES = 256 << 20
"""Size of the float32 logits, [N, V], of which logprobs are taken at once: a prompt's are too many for any memory."""
MOST_NUMBERS = 16 << 10
"""Logprobs in one part of a prompt's: few enough that encoding or decoding it keeps no event loop for long."""
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Size of the logits whose exponentials are summed at once. On a CPU more than a few MiB are fresh pages, 1.5 and not
0.4 ms a row of 151,936; on a GPU torch makes float64 of them first: three times the logits' bytes in all."""


def rows_at_once(vocab_size: int, num_top: int) -> int:
    """Rows of which logprobs are taken at once, at least one."""
    return max(1, min(LOGITS_BYTES // (4 * vocab_size), MOST_NUMBERS // (num_top + 1)))


class PendingLogprobs:
    """Logprobs of one token a row and of the row's likeliest tokens, on their way to the host."""

    def __init__(self, logits: Tensor, ids: Tensor, num_top: int):
        """logits float32 [N, V], ids int64 [N] on the same device; both may be overwritten by the next launch."""
        total_N = log_sum_exp(logits)
        top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        logprob_N = logits.gather(1, ids[:, None].clamp(min=0))[:, 0].double() - total_N  # NO_TOKEN has none
        self._logprob_N = to_host(logprob_N)
        self._top_ids_NK = to_host(top.indices)
        self._top_NK = to_host(top.values.double() - total_N[:, None])

    def rows(self, num_top: Sequence[int]) -> list[Logprobs]:
        """Logprobs of each row, with num_top[i] alternatives of row i. Only once the device has computed them."""
        rows = zip(self._logprob_N.tolist(), self._top_ids_NK.tolist(), self._top_NK.tolist(), num_top, strict=True)
        return [
            Logprobs(logprob, tuple(map(Alternative, top_ids[:count], top[:count])))
            for logprob, top_ids, top, count in rows
        ]

    def part(self, start: int) -> PromptLogprobs:
        """Logprobs of a prompt's tokens from `start` on. Only once the device has computed them."""
        arrays = (self._logprob_N, self._top_ids_NK.flatten(), self._top_NK.flatten())
        return PromptLogprobs(start, *(tuple(array.tolist()) for array in arrays))


class PromptScores:
    """Logprobs of a prompt's own tokens from one step, in parts, on their way to the host."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, PendingLogprobs, torch.cuda.Event | None]] = []

    def add(self, start: int, logits: Tensor, targets: Sequence[int], num_top: int) -> None:
        """Row i of logits [N, V] predicts targets[i], the prompt's token at `start` + i; N may be 0."""
        pending = PendingLogprobs(logits, upload_values(targets, logits.device), num_top)
        self._pending.append((start, pending, recorded(logits.device)))

    def parts(self) -> list[PromptLogprobs]:
        """The parts, in order. Waits until the device has computed them."""
        parts = []
        for start, pending, arrived in self._pending:
            if arrived is not None:
                arrived.synchronize()
            parts.append(pending.part(start))
        return parts


def log_sum_exp(logits: Tensor) -> Tensor:
    """float64 [N] of float32 logits [N, V], summed in float64. NaN for a row with a NaN, an inf, or -inf alone."""
    block = max(1, BLOCK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    return torch.cat([_log_sum_exp(rows) for rows in logits.split(block)])


def _log_sum_exp(logits: Tensor) -> Tensor:
    best = logits.amax(dim=-1, keepdim=True)
    return (logits - best).exp_().sum(dim=-1, dtype=torch.float64).log_() + best[:, 0]


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, filled when the device has come so far; the host waits for nothing."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values, non_blocking=True)


def recorded(device: torch.device, *, is_timed: bool = False) -> torch.cuda.Event | None:
    """An event behind everything launched so far; None on a CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=is_timed)
    event.record()
    return event
