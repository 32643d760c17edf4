"""Drafts of a simulated node's steps, chosen as a real one's `auto` count does once it knows the chances. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.speculation.draft_count import PromptWork, StepPrice, best_counts
from headrace.step_costs import StepCosts, StepShape


class StepDrafts(NamedTuple):
    """Drafts of a step, and what they give.

    counts   drafts of each answer; none if nothing is drafted
    tokens   that the step gives each answer, on average
    """

    counts: Sequence[int] = ()
    tokens: float = 1.0


PLAIN = StepDrafts()
LEAST_TOKENS = 16
"""Tokens of prompts that a step computes at the least: a block."""


@dataclass(frozen=True)
class Drafts:
    """How a node drafts.

    chances   that a draft is right, and all before it, by its place; none: it does not draft
    """

    chances: tuple[float, ...] = ()

    def of_step(
        self, costs: StepCosts, answers: StepShape, waiting: StepShape, max_step_tokens: int, token_gap_s: float | None
    ) -> StepDrafts:
        """The drafts of a step with these answers, while these prompts wait, of which it computes so many tokens."""
        number = answers.num_decoding
        if not self.chances or not number:
            return PLAIN
        price = _price(costs, answers, waiting, max_step_tokens, token_gap_s)
        most = max(0, max_step_tokens - number) // 2  # as many tokens stay for prompts
        counts = best_counts([self.chances] * number, price, most)
        if not any(counts):
            return PLAIN
        return StepDrafts(counts, 1 + sum(sum(self.chances[:count]) for count in counts) / number)


NO_DRAFTS = Drafts()


def _price(
    costs: StepCosts, answers: StepShape, waiting: StepShape, max_step_tokens: int, token_gap_s: float | None
) -> StepPrice:
    """As the engine prices a step (headrace/engine/drafts/drafting.py)."""
    plain_s, prompts, limit_s = costs.decode_part_s(answers), None, math.inf
    if waiting.prefill_tokens:
        work_s = costs.prompt_work_s(waiting)
        token_s, share = work_s / waiting.prefill_tokens, min(1.0, max_step_tokens / waiting.prefill_tokens)
        least_s = token_s * min(LEAST_TOKENS, waiting.prefill_tokens)
        prompts = PromptWork(max(least_s, share * work_s), least_s, (plain_s - costs.step_s) / answers.num_decoding)
        plain_s += costs.chunk_s
    if token_gap_s is not None:
        limit_s = costs.longest_s(token_gap_s)
    return StepPrice(answers.num_decoding, plain_s, costs.check_s, costs.draft_s, limit_s, prompts=prompts)
