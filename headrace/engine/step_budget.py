"""Costs of a step's tokens, and the budget that a step has left for prompts. Pure.

A token's attention costs in proportion to its depth, the number of tokens before it. At `parity_depth` it costs as much
as all the rest of the token's work, so that a chunk costs tokens * (1 + mean depth / parity_depth), in tokens at depth
0: with the tiny Qwen3.5 (4,882) one of 128 tokens at depth 32,000 costs 969 of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.cache.checkpoints import ChunkSpan

ROUNDING = 1e-6
"""Tokens that `of` and back again may lose."""


@dataclass(frozen=True)
class TokenCost:
    """Costs of tokens by their depth. Raises ValueError unless `parity_depth` is positive.

    parity_depth   where attention costs a token as much as all else (`attention_parity_position`); inf: depth is free
    """

    parity_depth: float

    def __post_init__(self) -> None:
        if not self.parity_depth > 0:
            raise ValueError(f"parity_depth {self.parity_depth}: must be positive")

    def of(self, span: ChunkSpan) -> float:
        """In tokens at depth 0. Token i attends to i + 1 tokens, which the mean of start and end is near enough."""
        return (span.end - span.start) * (1 + (span.start + span.end) / 2 / self.parity_depth)

    def fitting(self, start: int, cost: float) -> int:
        """The most tokens from depth `start` on that cost so much at most: the inverse of `of`."""
        # With d = parity_depth, n (1 + start / d) + n^2 / 2d = cost, solved without a difference of large numbers.
        at_start = 1 + start / self.parity_depth
        num_tokens = 2 * cost / (at_start + math.sqrt(at_start * at_start + 2 * cost / self.parity_depth))
        return int(num_tokens + ROUNDING)


@dataclass(frozen=True)
class StepBudget:
    """Tokens and cost that a step has left.

    num_tokens   rows, which take memory
    cost         in tokens at depth 0, which take time
    """

    token_cost: TokenCost
    num_tokens: int
    cost: float

    def fitting(self, start: int) -> int:
        """The most tokens of a sequence from depth `start` on that fit."""
        return min(self.num_tokens, self.token_cost.fitting(start, self.cost))

    def without(self, span: ChunkSpan) -> StepBudget:
        """Budget that is left beside this chunk."""
        left = max(0.0, self.cost - self.token_cost.of(span))
        return replace(self, num_tokens=self.num_tokens - (span.end - span.start), cost=left)

    def part(self, share: float) -> StepBudget:
        """Budget of such a share of it, in whole tokens."""
        return replace(self, num_tokens=int(self.num_tokens * share), cost=self.cost * share)
