"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and the logprobs that were asked for.

Logprobs are those of the model itself, before penalties and temperature. A draw is an inverse CDF over
tokens ordered by probability, at the request's own uniform number: it depends on the logits, the seed and
the position, and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.randomness import uniform
from wire.messages import Alternative, Logprobs, Sampling, Token

COLDEST = 1e-5  # at and below this temperature the best token is taken: dividing by less overflows


@dataclass(frozen=True)
class Draw:
    """One token to sample: `tokens` so far, of which the first `num_prompt_tokens` are the prompt.

    `banned` are the ids that may not come now: the stop tokens while `min_tokens` is not reached.
    """

    sampling: Sampling
    tokens: Sequence[int]
    num_prompt_tokens: int
    banned: Sequence[int] = ()


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Token]:
    """One token for each row. logits [N, V] float32, N = len(draws); not changed."""
    if not draws:
        return []
    adjusted = _penalised(logits, draws)
    chosen = adjusted.argmax(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > COLDEST]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        chosen[index] = _drawn(adjusted[index], [draws[row] for row in random_rows])
    ids = chosen.tolist()
    return [
        Token(token_id, _logprobs(logits[row], token_id, draw.sampling.logprobs))
        for row, (token_id, draw) in enumerate(zip(ids, draws, strict=True))
    ]


def score(logits: Tensor, targets: Sequence[int], num_top: int) -> list[Token]:
    """Logprobs of given tokens: row i of logits [N, V] predicts targets[i]."""
    return [
        Token(target, _logprobs(row, target, num_top)) for row, target in zip(logits, targets, strict=True)
    ]


def _logprobs(logits: Tensor, token_id: int, num_top: int | None) -> Logprobs | None:
    if num_top is None:
        return None
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    top = logprobs.topk(min(num_top, logprobs.numel()))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Logprobs(float(logprobs[token_id]), tuple(Alternative(i, p) for i, p in alternatives))


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Repetition over prompt and answer (Keskar et al. 2019), presence and frequency over the answer (OpenAI)."""
    rows = [row for row, draw in enumerate(draws) if draw.banned or _has_penalty(draw.sampling)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        draw, sampling, line = draws[row], draws[row].sampling, logits[row]
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(list(set(draw.tokens)), device=logits.device)
            values = line[seen]
            line[seen] = torch.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        answer = draw.tokens[draw.num_prompt_tokens :]
        if answer and (sampling.presence_penalty or sampling.frequency_penalty):
            ids, counts = torch.tensor(answer, device=logits.device).unique(return_counts=True)
            line[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if draw.banned:
            line[torch.tensor(draw.banned, device=logits.device)] = -torch.inf
    return logits


def _has_penalty(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [N] from logits [N, V], each row by its own parameters."""

    def column(name: str) -> Tensor:
        values = [float(getattr(draw.sampling, name)) for draw in draws]
        return torch.tensor(values, device=logits.device, dtype=torch.float64).unsqueeze(1)

    # Sorted by logit, ties by id: the order, and so the draw, is the same wherever it is computed.
    values_NV, ids_NV = torch.sort(
        logits.double() / column("temperature"), dim=-1, descending=True, stable=True
    )
    probs_NV = torch.softmax(values_NV, dim=-1)
    ranks = torch.arange(probs_NV.shape[1], device=logits.device)
    top_k = column("top_k")
    keep = (ranks < top_k) | (top_k == 0)
    probs_NV = probs_NV * keep
    probs_NV = probs_NV / probs_NV.sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is below top_p: the first always does.
    keep = probs_NV.cumsum(dim=-1) - probs_NV < column("top_p")
    keep &= probs_NV >= column("min_p") * probs_NV[:, :1]
    keep[:, 0] = True
    cumulative = (probs_NV * keep).cumsum(dim=-1)
    numbers = [uniform(draw.sampling.seed, len(draw.tokens)) for draw in draws]
    threshold = (
        torch.tensor(numbers, device=logits.device, dtype=torch.float64).unsqueeze(1) * cumulative[:, -1:]
    )
    rank = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=probs_NV.shape[1] - 1)
    return ids_NV.gather(1, rank).squeeze(1)
