"""Costs of a step's tokens, and the budget that a step has left for prompts. Pure.

A token's attention costs in proportion to its depth, the number of tokens before it. A chunk costs
tokens * (token + depth * their mean depth): in tokens at depth 0, as the model's sizes say, or in seconds, as the node
has measured. With the tiny Qwen3.5 (attention costs as much as all else at 4,882) a chunk of 128 tokens at depth 32,000
costs 969 of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.cache.checkpoints import ChunkSpan
from headrace.step_costs import StepCosts

ROUNDING = 1e-6
"""Tokens that `of` and back again may lose."""


@dataclass(frozen=True)
class TokenCost:
    """Costs of tokens by their depth. Raises ValueError if one is negative.

    token   at depth 0
    depth   more for each token before it
    """

    token: float
    depth: float

    def __post_init__(self) -> None:
        if not (self.token >= 0 and self.depth >= 0):
            raise ValueError(f"costs of a token {self.token} and of its depth {self.depth}: must not be negative")

    @classmethod
    def in_tokens(cls, parity_depth: float) -> TokenCost:
        """Costs in tokens at depth 0: at `parity_depth` a token costs two. inf: depth is free."""
        if not parity_depth > 0:
            raise ValueError(f"parity_depth {parity_depth}: must be positive")
        return cls(1.0, 1 / parity_depth)

    @classmethod
    def in_seconds(cls, costs: StepCosts) -> TokenCost:
        return cls(costs.token_s, costs.depth_s)

    def of(self, span: ChunkSpan) -> float:
        """Cost of a chunk. Token i attends to i + 1 tokens, which the mean of start and end is near enough."""
        return (span.end - span.start) * (self.token + self.depth * (span.start + span.end) / 2)

    def fitting(self, start: int, cost: float) -> int | None:
        """The most tokens from depth `start` on that cost so much at most: the inverse of `of`. None: any number."""
        # With d = depth, n (token + d start) + n^2 d / 2 = cost, solved without a difference of large numbers.
        at_start = self.token + self.depth * start
        divisor = at_start + math.sqrt(at_start * at_start + 2 * cost * self.depth)
        return int(2 * cost / divisor + ROUNDING) if divisor else None


@dataclass(frozen=True)
class StepBudget:
    """Tokens and cost that a step has left.

    num_tokens   rows, which take memory
    cost         what they take in time, in the unit of `token_cost`
    """

    token_cost: TokenCost
    num_tokens: int
    cost: float

    def fitting(self, start: int) -> int:
        """The most tokens of a sequence from depth `start` on that fit."""
        fitting = self.token_cost.fitting(start, self.cost)
        return self.num_tokens if fitting is None else min(self.num_tokens, fitting)

    def without(self, span: ChunkSpan) -> StepBudget:
        """Budget that is left beside this chunk."""
        left = max(0.0, self.cost - self.token_cost.of(span))
        return StepBudget(self.token_cost, self.num_tokens - (span.end - span.start), left)

    def at_most(self, cost: float) -> StepBudget:
        """Budget of no more than this cost."""
        return StepBudget(self.token_cost, self.num_tokens, min(self.cost, cost))

    def part(self, share: float) -> StepBudget:
        """Budget of such a share of it, in whole tokens."""
        return StepBudget(self.token_cost, int(self.num_tokens * share), self.cost * share)
