"""Sampling: logits to tokens by biases, penalties, grammars' masks, temperature, top-k, top-p and min-p, with the
requested logprobs.

A draw is an inverse CDF over tokens ordered by probability, at the request's own uniform number: it depends on the
logits, the seed and the position, and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.sampling.draw import COLDEST, Draw, uniform
from headrace.engine.sampling.logprobs import PendingLogprobs, recorded, rows_at_once, to_host
from headrace.engine.sampling.token_biases import TokenBiases
from headrace.engine.sampling.token_counts import TokenCounts
from headrace.kernels.lib.upload import upload_lists, upload_values
from headrace.kernels.sampling.argmax import argmax
from headrace.kernels.sampling.draw import draw as draw_tokens
from headrace.kernels.sampling.penalties import penalise
from headrace.kernels.sampling.token_mask import mask_tokens
from headrace.models.logits import Logits
from headrace.request import Logprobs, Token


@dataclass(frozen=True)
class PendingBans:
    """Bans that depend on tokens which only the device knows.

    flat_ids   row * V + id of each, int64; rows are those of the draws that are not greedy, in order
    values     -inf where the token before is the one that it depends on, else 0, float32
    """

    flat_ids: Tensor
    values: Tensor


def pending_bans(draws: Sequence[Draw], drawn: Tensor, vocab_size: int) -> PendingBans | None:
    """The bans of the draws' `banned_after`; None if there are none. `drawn` int64: the tokens of the last launch."""
    if not any(draw.banned_after for draw in draws):
        return None
    entries = [
        (row * vocab_size + token_id, draw.pending, before)
        for row, draw in enumerate(draw for draw in draws if not draw.is_greedy)
        for before, token_id in draw.banned_after
    ]
    flat_ids, pending, before = upload_lists(list(zip(*entries, strict=True)), drawn.device)
    holds = drawn.index_select(0, pending) == before
    return PendingBans(flat_ids, torch.zeros(len(entries), device=drawn.device).masked_fill_(holds, -torch.inf))


def choose(
    logits: Logits,
    draws: Sequence[Draw],
    token_counts: TokenCounts,
    token_biases: TokenBiases,
    bans: PendingBans | None = None,
    masks: Tensor | None = None,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """The drawn ids, int64 [N], on the logits' device; `token_counts` advance by them. Waits for nothing on a GPU.

    Logits [N, V], N = len(draws); not changed. Only rows whose draw is not greedy are made float32. Biases come first,
    then penalties, then bans, then masks: one for each draw with a `mask_row`, in order, as `mask_tokens` takes them.
    `num_accepted` int64: see `CheckSources`, for draws behind a check.
    """
    device = logits.rows.device
    # Zeros, as a rehearsal for the compiler launches no kernel and yet counts what was chosen.
    chosen = torch.zeros(len(draws), dtype=torch.int64, device=device)
    others = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if len(others) < len(draws):
        argmax(logits.rows, chosen)
    if others:
        index = upload_values(others, device)
        adjusted = logits.in_float32(index)
        other_draws = [draws[row] for row in others]
        chosen[index] = _choose(adjusted, other_draws, token_counts, token_biases, bans, masks, num_accepted)
    return chosen


def _choose(
    adjusted: Tensor,
    draws: Sequence[Draw],
    token_counts: TokenCounts,
    token_biases: TokenBiases,
    bans: PendingBans | None,
    masks: Tensor | None,
    num_accepted: Tensor | None,
) -> Tensor:
    """As `choose`, of float32 logits, which are changed in place."""
    device = adjusted.device
    biased = [(row, draw.bias_row) for row, draw in enumerate(draws) if draw.bias_row is not None]
    penalised = [(row, draw.counts_row) for row, draw in enumerate(draws) if draw.counts_row is not None]
    banned = [row * adjusted.shape[1] + token_id for row, draw in enumerate(draws) for token_id in draw.banned]
    masked = [row for row, draw in enumerate(draws) if draw.mask_row is not None]
    if biased:
        token_biases.add(adjusted, *map(list, zip(*biased, strict=True)))
    if penalised:
        rows, count_rows = upload_lists(list(zip(*penalised, strict=True)), device)
        samplings = [draws[row].sampling for row, _ in penalised]
        settings = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in samplings]
        settings_K3 = upload_values(settings, device, torch.float64)
        penalise(adjusted, token_counts.values, rows, count_rows, settings_K3)
    if banned:
        adjusted.view(-1).index_fill_(0, upload_values(banned, device), -torch.inf)
    if bans is not None:
        adjusted.view(-1).index_add_(0, bans.flat_ids, bans.values)
    if masks is not None:
        mask_tokens(adjusted, masks, upload_values(masked, device))
    chosen = torch.zeros(len(draws), dtype=torch.int64, device=device)
    random_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > COLDEST]
    if len(random_rows) < len(draws):
        argmax(adjusted, chosen)
    if random_rows:
        index = upload_values(random_rows, device)
        settings_N4, numbers = _settings([draws[row] for row in random_rows], device, num_accepted)
        are_all = len(random_rows) == len(draws)  # then no copy, of a megabyte a row
        chosen[index] = draw_tokens(adjusted if are_all else adjusted[index], settings_N4, numbers)
    if penalised:
        token_counts.advance(count_rows, chosen.index_select(0, rows))
    return chosen


class OnDevice(Protocol):
    """Work of a device, whose end is an event; None on a CPU, where it is over when it is launched."""

    @property
    def arrived(self) -> torch.cuda.Event | None: ...

    @property
    def has_arrived(self) -> bool: ...


class Drawn:
    """A step's tokens on their way to the host: made when the step is launched, read when it is over."""

    def __init__(self, logits: Logits, ids: Tensor, draws: Sequence[Draw]):
        """Row i of logits [N, V] and ids [N] belong to draws[i]. Both may be overwritten by the next launch."""
        reported = [(row, num_top) for row, draw in enumerate(draws) if (num_top := draw.sampling.logprobs) is not None]
        most = max((num_top for _, num_top in reported), default=0)
        step = rows_at_once(logits.rows.shape[1], most)
        self._pending: list[tuple[PendingLogprobs, dict[int, int]]] = []
        for first in range(0, len(reported), step):
            num_top_of = dict(reported[first : first + step])
            rows = upload_values(list(num_top_of), ids.device)
            pending = PendingLogprobs(logits.in_float32(rows), ids.index_select(0, rows), most)
            self._pending.append((pending, num_top_of))
        self._on_host = to_host(ids)
        self._ids: list[int] | None = None
        self._logprobs: dict[int, Logprobs] = {}
        self.arrived = recorded(ids.device, is_timed=True)

    def ids(self) -> list[int]:
        """The drawn ids in the order of the draws. Waits for the step."""
        if self._ids is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self._ids = self._on_host.tolist()
        return self._ids

    def tokens(self, draws: slice = slice(None)) -> list[Token]:
        """The tokens of these draws, in order, with the requested logprobs. Waits for the step."""
        ids = self.ids()
        for pending, num_top_of in self._pending:
            self._logprobs.update(zip(num_top_of, pending.rows(list(num_top_of.values())), strict=True))
        self._pending.clear()
        if not self._logprobs:
            return [Token(token_id) for token_id in ids[draws]]
        return [Token(ids[row], self._logprobs.get(row)) for row in range(len(ids))[draws]]

    @property
    def has_arrived(self) -> bool:
        """True if the device is done with the step; False on a CPU, whose steps are over when they are launched."""
        return self.arrived is not None and self.arrived.query()

    def seconds_after(self, before: OnDevice) -> float | None:
        """Time on the device from the end of that work to the end of this step; None on a CPU. Both must be over."""
        if self.arrived is None or before.arrived is None:
            return None
        return before.arrived.elapsed_time(self.arrived) / 1000


def _settings(draws: Sequence[Draw], device: torch.device, num_accepted: Tensor | None) -> tuple[Tensor, Tensor]:
    """The inputs of `draw_tokens`: [N, 4] temperature, top_k, top_p, min_p, and a uniform number [N] each."""
    if any(draw.behind is not None for draw in draws):
        assert num_accepted is not None
        return _settings_behind(draws, device, num_accepted)
    rows = []
    for draw in draws:
        sampling = draw.sampling
        number = uniform(sampling.seed, draw.position)
        rows.append((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, number))
    settings_N5 = upload_values(rows, device, torch.float64)
    return settings_N5[:, :4], settings_N5[:, 4]


def _settings_behind(draws: Sequence[Draw], device: torch.device, num_accepted: Tensor) -> tuple[Tensor, Tensor]:
    """As `_settings`: of a draw behind a check, the numbers of all positions that it may have, and then its own one."""
    most = max(draw.behind.num_drafts for draw in draws if draw.behind is not None)
    numbers: dict[tuple[int, int], float] = {}  # draws of a sequence share most of theirs
    rows, places = [], []
    for draw in draws:
        sampling, behind = draw.sampling, draw.behind
        last = draw.position + (0 if behind is None else behind.num_drafts)
        found = []
        for position in range(draw.position, draw.position + most + 1):
            key = sampling.seed, min(position, last)
            if key not in numbers:
                numbers[key] = uniform(*key)
            found.append(numbers[key])
        rows.append((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, *found))
        places.append(-1 if behind is None else behind.row)
    settings = upload_values(rows, device, torch.float64)
    place_N = upload_values(places, device)
    accepted_N = torch.where(place_N >= 0, num_accepted[place_N.clamp(min=0)], 0)
    return settings[:, :4], settings[:, 4:].gather(1, accepted_N[:, None])[:, 0]
