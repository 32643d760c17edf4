"""Predicted seconds of a prompt and of an answer on one node. Pure; docs/routing.md has the formulas.

All work is in seconds of the node's own `StepCosts`. A node computes its waiting prompts in steps: each takes the
decode part of its sequences, `chunk_s`, and as much prompt work as `chunk_tokens` or the token gap leaves.

A decision asks for a few values of each node, within microseconds: so they are named tuples, and the sums plain code.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.step_costs import LONG_BESIDE_SHORT, SHORT_SHARE, StepCosts
from router.routing.candidates import MIN_GAP_TOKENS, MIN_TOKEN_S, Candidate, Load

MANY = 1 << 30
"""Answers of a node whose steps, by its measurement, take no longer for more of them."""


class NodePace(NamedTuple):
    """The steps of a node at one batch.

    decode_s       seconds of a step for its decoding sequences, without drafts
    drafted_s      the same with as many drafts as the node has lately
    step_work_s    prompt work in a step, at the most
    overhead_s     seconds of a step beside its prompt work
    keeps_gap      False: even the least prompt work makes a step longer than the gap, without drafts
    """

    decode_s: float
    drafted_s: float
    step_work_s: float
    overhead_s: float
    keeps_gap: bool

    def seconds(self, work_s: float) -> float:
        """Time of prompt work, in whole steps beside the decodes."""
        if work_s <= 0:
            return 0.0
        num_steps = work_s / self.step_work_s
        return work_s + (num_steps if num_steps > 1 else 1.0) * self.overhead_s


def pace(
    node: Candidate, num_decoding: float, context_tokens: float, token_gap_s: float | None, token_work_s: float
) -> NodePace:
    """The steps of a node that decodes so many sequences, beside a prompt whose tokens take `token_work_s` each.

    That is not `costs.token_s`, of a token at depth 0: a node whose prompts were all about as deep knows the sum of
    both costs well, and may take either for 0.
    """
    costs = node.costs
    step_work_s = token_work_s * node.chunk_tokens
    if not num_decoding:
        return NodePace(0.0, 0.0, step_work_s, costs.chunk_s, True)
    decode_s = costs.step_s + costs.decode_s * num_decoding + costs.context_s * context_tokens
    drafted_s = node.load.step_stretch * decode_s
    overhead_s = drafted_s + costs.chunk_s
    if token_gap_s is None:
        return NodePace(decode_s, drafted_s, step_work_s, overhead_s, True)
    least_s = token_work_s * MIN_GAP_TOKENS
    planned_s = max(least_s, costs.longest_s(token_gap_s) - overhead_s)
    keeps_gap = token_gap_s - (decode_s + costs.chunk_s) >= least_s
    return NodePace(decode_s, drafted_s, min(step_work_s, planned_s), overhead_s, keeps_gap)


def answers_at_once(load: Load, costs: StepCosts, num_steps: float) -> tuple[float, float]:
    """Answers that a node generates at once while one more runs for so many steps, and the tokens of their contexts.

    Those that come do not come together: their prompts end one after the other, in the time that was predicted for
    them. Of answers that are shorter than that, the first have ended when the last begin.
    """
    number, tokens = load.num_decoding + load.num_coming, load.context_tokens + load.coming_tokens
    if load.coming_s <= 0.0:  # none was predicted; sums of fractions leave rests
        return number, tokens
    step_s = costs.step_s + costs.decode_s * load.num_decoding + costs.context_s * load.context_tokens
    share = num_steps * step_s * load.num_coming / load.coming_s
    if share >= 1.0:
        return number, tokens
    return max(load.num_decoding, share * number), max(load.context_tokens, share * tokens)


def lost_share(
    node: Candidate, after: NodePace, more_s: float, token_gap_s: float | None, token_work_s: float, work_s: float
) -> float:
    """Share of the steps' prompt work, while `work_s` of it waits, that a node loses if their decodes take `more_s`
    seconds more: then they are `after`. The other arguments are those of `pace`."""
    in_step_s = work_s if work_s < after.step_work_s else after.step_work_s
    step_s = in_step_s + after.overhead_s
    if token_gap_s is None:
        return more_s / step_s
    before_s, most_s = after.overhead_s - more_s, token_work_s * node.chunk_tokens
    if more_s < after.drafted_s:
        most_s = min(most_s, max(token_work_s * MIN_GAP_TOKENS, node.costs.longest_s(token_gap_s) - before_s))
    before_in_step_s = min(work_s, most_s)
    return 1.0 - in_step_s / step_s * (before_in_step_s + before_s) / before_in_step_s


def least_step_s(node: Candidate) -> float:
    """A step of a node's present batch with as few tokens of prompts as there can be, and without drafts."""
    costs, load = node.costs, node.load
    now = pace(node, load.num_decoding, load.context_tokens, None, costs.token_s)
    return now.decode_s + costs.chunk_s + costs.token_s * MIN_GAP_TOKENS


def room_within_gap(node: Candidate, token_gap_s: float) -> int:
    """So many answers more, as long as those that the node has, make its steps as long as the gap allows.

    At least one for a node that has none: a gap that no node can keep does not leave them idle.
    """
    costs, load = node.costs, node.load
    num_answers, num_tokens = load.num_decoding + load.num_coming, load.context_tokens + load.coming_tokens
    left_s = token_gap_s - costs.step_s - costs.decode_s * num_answers - costs.context_s * num_tokens
    of_each_s = costs.decode_s + costs.context_s * num_tokens / max(num_answers, 1)
    return max(int(not num_answers), int(left_s / of_each_s)) if of_each_s else MANY


class Line(NamedTuple):
    """The prompts that wait at a node, as one of some length meets them.

    ahead_s    work that is done before it: of prompts that are shorter, or hardly longer
    behind_s   work of longer prompts: the first of them keeps a third of each step
    number     how many prompts wait, about
    work_s     of all of them
    """

    ahead_s: float
    behind_s: float
    number: float
    work_s: float

    def weighed(self, ahead: float, behind: float) -> float:
        """The number of prompts, each by its weight; those ahead and behind have as large shares as their work."""
        if not self.work_s:
            return 0.0
        return self.number * (ahead * self.ahead_s + behind * self.behind_s) / self.work_s


NO_LINE = Line(0.0, 0.0, 0.0, 0.0)


def line(load: Load, costs: StepCosts, num_tokens: int) -> Line:
    """The waiting prompts by how many tokens each has left.

    A node lets a prompt go before the first one if it has less than half as many tokens left: prompts with up to twice
    `num_tokens` are ahead.
    """
    waiting_tokens = load.waiting_tokens
    if waiting_tokens <= 0:
        return NO_LINE
    work_s = costs.token_s * waiting_tokens + costs.depth_s * load.waiting_depths
    lengths, above = load.waiting_lengths, num_tokens.bit_length()
    if above >= len(lengths):  # all are shorter, or nobody knows
        return Line(work_s, 0.0, load.num_waiting or 1.0, work_s)
    # Of those that are longer by their size, as many are ahead as are at most twice as long.
    ahead = sum(lengths[:above]) + (2 * num_tokens / (1 << above) - 1) * lengths[above]
    ahead_s = work_s * ahead / waiting_tokens if ahead < waiting_tokens else work_s
    return Line(ahead_s, work_s - ahead_s, load.num_waiting, work_s)


def prompt_work_s(costs: StepCosts, start: int, end: int) -> float:
    """Work of a prompt's tokens from `start` up to `end`, without the fixed cost of each chunk."""
    depths = (end * (end - 1) - start * (start - 1)) // 2
    return max(costs.token_s, MIN_TOKEN_S) * (end - start) + costs.depth_s * depths


def first_token_s(pace: NodePace, waiting: Line, own_s: float) -> float:
    """Seconds until a prompt with `own_s` of work is computed.

    The step that is running ends first. Longer prompts take up to a third of each step, and the step with the prompt's
    last token is as long as what waits fills it.
    """
    before_s, behind_s, step_s = waiting.ahead_s + own_s, waiting.behind_s, pace.step_work_s
    beside_s = LONG_BESIDE_SHORT * before_s
    needed_s = before_s + (behind_s if behind_s < beside_s else beside_s)
    if needed_s < step_s:
        needed_s = min(before_s + behind_s, step_s)
    work_s = waiting.work_s
    running_s = ((work_s if work_s < step_s else step_s) + pace.drafted_s) / 2
    return running_s + pace.seconds(needed_s)


def overtaken_s(load: Load, pace: NodePace, num_tokens: int, token_work_s: float, seconds: float) -> float:
    """Seconds that a prompt of `num_tokens` waits for shorter ones that come while it is computed, for `seconds`.

    Those with less than half as many tokens go before it, with up to two thirds of each step. They are taken to come as
    they were computed lately, and their tokens to cost as much as its own: too much where its context is long.
    """
    recent, half = load.recent_lengths, num_tokens / 2
    power = int(half).bit_length() - 1
    if not recent or power < 0:
        return 0.0
    shorter = sum(recent[:power])
    if power < len(recent):
        shorter += recent[power] * (half / (1 << power) - 1)
    share = shorter * token_work_s * (pace.step_work_s + pace.overhead_s) / pace.step_work_s
    share = share if share < SHORT_SHARE else SHORT_SHARE
    return seconds * share / (1.0 - share)


def prompt_wait_s(node: Candidate, num_tokens: int, token_gap_s: float | None = None) -> float:
    """Seconds by which the prompts that a node has delay one of `num_tokens` tokens."""
    load = node.load
    own_s = prompt_work_s(node.costs, 0, num_tokens)
    steps = pace(node, load.num_decoding, load.context_tokens, token_gap_s, own_s / max(num_tokens, 1))
    return first_token_s(steps, line(load, node.costs, num_tokens), own_s) - steps.seconds(own_s)


def place_wait_s(node: Candidate, tokens: int, answer_s: float) -> float:
    """Seconds until the node has a slot and blocks for `tokens` tokens; `answer_s`: of one answer there.

    One of its sequences ends every `answer_s / num_decoding` seconds, and gives back its slot and its share of the
    blocks.
    """
    load = node.load
    if load.free_slots > 0 and load.free_tokens >= tokens:
        return 0.0
    missing = float(max(0, 1 - load.free_slots))
    if load.free_tokens < tokens:
        mean_tokens = max(1.0, load.context_tokens / max(load.num_decoding, 1))
        missing = max(missing, (tokens - load.free_tokens) / mean_tokens)
    return missing * answer_s / max(load.num_decoding, 1)
