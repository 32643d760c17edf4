"""Drafts of which as many are right as others publish for trained layers ("golden"), whatever the weights.

An MTP layer of random weights is never right. Everything is computed as in a served request: drafts, the pass that
checks them, states and tokens. But then the drawn tokens are overwritten on the device, before anything behind reads
them: blocks, states and hits are those of the tokens that the client gets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.engine.sampling.sampler import Drawn
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.upload import PinnedBuffers

GOLDEN = (0.91, 0.82, 0.66)
"""Shares of checks in which the first draft is right, the first two are, all three are: 2.73 tokens a step with 2
drafts, 3.39 with 3, and 1.91 where only one is checked."""
CYCLE = 100


def tokens_a_step(num_drafts: int) -> float:
    """Mean tokens of a check of so many drafts."""
    return 1 + sum(GOLDEN[:num_drafts])


class RightDrafts:
    """Numbers of accepted drafts, one a check, shuffled: of every CYCLE checks the shares have exactly their parts."""

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` of checks in which at least the first draft is right, the first two, and so on."""
        self._cycle = [sum(number < round(CYCLE * share) for share in shares) for number in range(CYCLE)]
        self._random = random.Random(0)
        self._left: list[int] = []

    def next(self, most: int) -> int:
        if not self._left:
            self._left = self._random.sample(self._cycle, CYCLE)
        return min(most, self._left.pop())


class PinnedDrafts:
    """Replaces a runner's `launch` by one in which as many drafts are right as `right` says.

    It takes requests without penalties and logprobs, and costs the device a kernel and a copy in each step with drafts.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.right = RightDrafts(GOLDEN)
        self._runner, self._launch = runner, runner.launch
        self._buffers = PinnedBuffers(runner._drawn.device, torch.int64)
        runner.launch = self._pinned  # type: ignore[method-assign]

    @torch.inference_mode()
    def _pinned(self, inputs: Sequence[SequenceInput], draws: Sequence[tuple[int, Draw]], *rest: Any) -> Launched:
        launched = self._launch(inputs, draws, *rest)
        if not any(entry.has_drafts for entry in inputs):
            return launched
        ids = self._overwritten(inputs, [row for row, _ in draws])
        return replace(launched, drawn=Drawn(launched.logits, ids[: len(draws)], [draw for _, draw in draws]))

    def _overwritten(self, inputs: Sequence[SequenceInput], rows: list[int]) -> Tensor:
        """The drawn tokens, of which those at accepted drafts are these, and each next one is not its draft.

        rows   the logit row of each draw

        On the device: the host may know neither the tokens nor the drafts, and passes behind them read both.
        """
        drawn, sources = self._runner._drawn, self._runner._sources
        made = None if sources is None else sources.drafted
        of_entries: list[tuple[int, int, int, int]] = []
        known: list[int] = []
        first_row = 0
        for entry in inputs:
            if entry.has_drafts:
                num_drafts = len(entry.tokens) - 1
                right = self.right.next(num_drafts)
                pinned = min(right + 1, num_drafts)
                future = -1 if entry.future_drafts is None else entry.future_drafts
                of_entries.append((first_row, pinned, right, future))
                known += entry.tokens[1 : 1 + pinned]
            first_row += entry.num_logits
        first, num_pinned, right_each, future_each = np.array(of_entries).T
        first_pinned = np.cumsum(num_pinned) - num_pinned
        place = np.arange(len(known)) - np.repeat(first_pinned, num_pinned)  # among its entry's drafts
        future_row = np.repeat(future_each, num_pinned)
        draw_of_row = np.full(first_row, -1, dtype=np.int64)
        draw_of_row[rows] = np.arange(len(rows))
        with self._buffers.next(4 * len(known)) as packed:
            numbers = packed.numpy().reshape(4, -1)
            numbers[0] = draw_of_row[np.repeat(first, num_pinned) + place]
            assert numbers[0].min() >= 0, "a checked row without a draw"
            numbers[1] = known
            numbers[2] = -1 if made is None else np.where(future_row < 0, -1, future_row * made.shape[1] + place)
            numbers[3] = place == np.repeat(right_each, num_pinned)
            write = write_drafts_triton if drawn.is_cuda else write_drafts_torch
            write(packed, drawn if made is None else made, drawn)
        return drawn


def write_drafts_torch(packed: Tensor, made: Tensor, drawn: Tensor) -> None:
    """drawn[place] = the draft, or another token of the vocabulary, whose size is even.

    packed   [4 * N] int64: places, known drafts, where they are in `made` or -1 for known ones, 1 for another token
    """
    place, known, source, is_wrong = packed.view(4, -1)
    drawn[place] = torch.where(source >= 0, made.view(-1)[source.clamp(min=0)], known) ^ is_wrong


@triton.jit(do_not_specialize=["N"])
def _write_drafts_kernel(packed_ptr, made_ptr, drawn_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = n < N
    source = tl.load(packed_ptr + 2 * N + n, mask=is_here, other=-1)
    made = tl.load(made_ptr + tl.maximum(source, 0), mask=source >= 0, other=0)
    draft = tl.where(source >= 0, made, tl.load(packed_ptr + N + n, mask=is_here, other=0))
    is_wrong = tl.load(packed_ptr + 3 * N + n, mask=is_here, other=0)
    tl.store(drawn_ptr + tl.load(packed_ptr + n, mask=is_here, other=0), draft ^ is_wrong, mask=is_here)


def write_drafts_triton(packed: Tensor, made: Tensor, drawn: Tensor) -> None:
    N = len(packed) // 4
    _write_drafts_kernel[(cdiv(N, 128),)](packed, made, drawn, N, BLOCK=128)
