"""Sampling: from logits to tokens by penalties, temperature, top-k, top-p and min-p, with the requested logprobs.

A draw is an inverse CDF over tokens ordered by probability, at the request's own uniform number: it depends on the
logits, the seed and the position, and on nothing else in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.draw import COLDEST, Draw, uniform
from headrace.engine.logprobs import PendingLogprobs, recorded, rows_at_once, to_host
from headrace.kernels.lib.upload import upload_values
from headrace.kernels.sampling.draw import draw as draw_tokens
from headrace.request import Logprobs, Token


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Token]:
    """One token for each row. logits [N, V] float32, N = len(draws); not changed."""
    return Drawn(logits, choose(logits, draws), draws).tokens()


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The drawn ids, int64 [N], on the logits' device. Waits for nothing on a GPU."""
    adjusted = _penalised(logits, draws)
    chosen = adjusted.argmax(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > COLDEST]
    if random_rows:
        index = upload_values(random_rows, logits.device)
        settings, numbers = _settings([draws[row] for row in random_rows], logits.device)
        chosen[index] = draw_tokens(adjusted[index], settings, numbers)
    return chosen


class Drawn:
    """A step's tokens on their way to the host: made when the step is launched, read when it is over."""

    def __init__(self, logits: Tensor, ids: Tensor, draws: Sequence[Draw]):
        """Row i of logits [N, V] and ids [N] belong to draws[i]. Both may be overwritten by the next launch."""
        wanted = [(row, draw.sampling.logprobs) for row, draw in enumerate(draws)]
        reported = [(row, num_top) for row, num_top in wanted if num_top is not None]
        most = max((num_top for _, num_top in reported), default=0)
        step = rows_at_once(logits.shape[1], most)
        self._pending: list[tuple[PendingLogprobs, dict[int, int]]] = []
        for first in range(0, len(reported), step):
            num_top_of = dict(reported[first : first + step])
            rows = upload_values(list(num_top_of), logits.device)
            pending = PendingLogprobs(logits.index_select(0, rows), ids.index_select(0, rows), most)
            self._pending.append((pending, num_top_of))
        self._ids = to_host(ids)
        self._arrived = recorded(ids.device)

    def tokens(self) -> list[Token]:
        """The tokens in the order of the draws, with the requested logprobs. Waits for the step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        logprobs: dict[int, Logprobs] = {}
        for pending, num_top_of in self._pending:
            logprobs.update(zip(num_top_of, pending.rows(list(num_top_of.values())), strict=True))
        return [Token(token_id, logprobs.get(row)) for row, token_id in enumerate(self._ids.tolist())]


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Repetition over prompt and answer (Keskar et al. 2019), presence and frequency over the answer (OpenAI)."""
    rows = [row for row, draw in enumerate(draws) if draw.banned or draw.has_penalty]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        draw, sampling, line = draws[row], draws[row].sampling, logits[row]
        if sampling.repetition_penalty != 1.0:
            seen = upload_values(list(set(draw.tokens)), logits.device)
            values = line[seen]
            line[seen] = torch.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        answer = draw.tokens[draw.num_prompt_tokens :]
        if answer and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = Counter(answer)
            penalties = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
            line[upload_values(list(counts), logits.device)] -= upload_values(penalties, logits.device, line.dtype)
        if draw.banned:
            line[upload_values(draw.banned, logits.device)] = -torch.inf
    return logits


def _settings(draws: Sequence[Draw], device: torch.device) -> tuple[Tensor, Tensor]:
    """The inputs of `draw_tokens`: [N, 4] temperature, top_k, top_p, min_p, and a uniform number [N] each."""
    rows = []
    for draw in draws:
        sampling = draw.sampling
        number = uniform(sampling.seed, draw.position)
        rows.append((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, number))
    settings_N5 = upload_values(rows, device, torch.float64)
    return settings_N5[:, :4], settings_N5[:, 4]
