"""The seconds that a plan costs: its own request, the requests already there, and what later ones find. Pure.

A node's part of a plan depends on the node alone, save for what travels between two nodes: a prompt costs what
`prompt_part` says, an answer what `answer_part` says. So all plans are priced from one pass over the nodes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from headrace.wire.node_messages import Role
from router.routing.candidates import SHORT_ANSWER_TOKENS, Candidate, Load
from router.routing.plan import RoutedRequest
from router.routing.policies.times import (
    NO_LINE,
    Line,
    answers_at_once,
    first_token_s,
    line,
    lost_share,
    overtaken_s,
    pace,
    place_wait_s,
    prompt_work_s,
)

STALL_WEIGHT = 400.0
"""A second in which an answer waits for prompts counts so many times more, divided by its tokens: 0.1 s is little
among 300 tokens, and doubles the time of 40. Measured on traces (docs/routing.md). Where a token gap is asked for,
nodes bound such waits themselves."""
MOST_STALLED = 3
"""For so many answers of a node such seconds count whole: where more generate, prompts delay some anyhow, and chats
sent away from their caches cost 3 of 100 requests their times at twenty times a trace's speed."""
PROMPT_WEIGHT = 3.0
"""Work on a prompt delays the prompts behind it, and in a busy cluster as many again that come until these are done: a
second of theirs counts so much."""
AHEAD_WEIGHT = 1.5
"""The same for prompts that go before it: they are done by then, and only those are delayed that come meanwhile. Where
requests wait for room these are as many as behind it: there both count alike. Measured on simulated chats and on a
trace at twenty times its speed (docs/routing.md)."""
HOSTED_WEIGHT = 9.0
"""The same for prompts at a node whose role is to compute them, and whose steps an answer makes short for as long as it
lasts. Measured on simulated chats (docs/routing.md)."""
WITHIN_GAP_WEIGHT = 0.25
"""A second of an answer's delay counts so much where a token gap is asked for and leaves prompts little of a step:
within it nobody minds much."""
WHOLE_SHARE = 0.6
"""From this share of a step on that a gap leaves to prompts, such a second counts whole: prompts make all answers take
twice as long and more. Below it by the square of the share. Measured on simulated chats (docs/routing.md)."""
MOST_MEANT = 2.0
"""Prompts that are taken to wait at a node whose role is to compute them, at the most, while few do: they will come.
Fewer where they waited for little of the time lately, as in a queue that is busy for that share."""
STORED_WEIGHT = 8.0
"""A token that a node stores anew takes the place of one that others would have found, and a chat that has left its
cache leaves it for good: so many times the work of a token, measured on traces (docs/routing.md)."""
RECEIVED_WEIGHT = 1.0
"""The same for a token that a node receives, by which its chat has two copies, while the node has empty blocks."""
DISPLACING_WEIGHT = 4.0
"""And if the second copy takes the place of something else."""
SHORT_WEIGHT = 2.0
"""Both count so many times more where caches are short: what a second copy displaces there is computed anew. Measured
on simulated chats (docs/routing.md)."""


class PromptPart(NamedTuple):
    """A prompt, computed on one node.

    first_token_s    from now to its first token
    others_s         more time for the other requests there, and for later ones
    computed_tokens  of the prompt
    keeps_gap        False: the node cannot compute prompts beside its decodes within the gap
    fetch_from       sends the state and the blocks from which the node starts; None: they are its own
    seconds          of all requests: others' time, and that to the first token if no shorter prompts overtook this one
    """

    node: Candidate
    first_token_s: float
    others_s: float
    computed_tokens: int
    keeps_gap: bool
    fetch_from: str | None
    seconds: float


class AnswerPart(NamedTuple):
    """An answer, generated on one node.

    wait_s        for a slot and blocks: before the prompt is computed
    rest_s        from the first token to the last
    others_s      more time for the other requests there
    received_s    work that the blocks that it gets from elsewhere push out of its cache
    held_share    seconds that others lose for each one in which room for the request is held here, unused
    token_gap_s   a step without prompts; the node keeps prompts within the gap
    seconds       of all requests: wait, rest, others' and received
    """

    node: Candidate
    wait_s: float
    rest_s: float
    others_s: float
    received_s: float
    held_share: float
    token_gap_s: float
    seconds: float


class Meeting(NamedTuple):
    """A node as a request meets it.

    start     position from which it computes the prompt: both its groups are cached there
    work_s    of the prompt from there on
    waiting   the prompts that wait there
    """

    node: Candidate
    start: int
    work_s: float
    waiting: Line


def meeting(request: RoutedRequest, node: Candidate, start: int | None = None) -> Meeting:
    """The node as it computes the prompt from `start`; None: from its own newest checkpoint."""
    costs, load, num_tokens = node.costs, node.load, request.num_tokens
    if start is None:
        start = 0 if request.is_scored else node.hit.resumable_tokens
        start = start if start < num_tokens else max(num_tokens - 1, 0)
    waiting = line(load, costs, num_tokens - start) if load.waiting_tokens else NO_LINE
    return Meeting(node, start, prompt_work_s(costs, start, num_tokens), waiting)


def fetched_prompt_part(request: RoutedRequest, node: Candidate, holder: Candidate) -> PromptPart | None:
    """The prompt, computed on this node from the newest checkpoint of another; None: that is of no use to it."""
    start = min(holder.hit.state_tokens, request.num_tokens - 1) // node.block_size * node.block_size
    if start <= node.hit.resumable_tokens or request.is_scored:
        return None
    ready_s = fetch_s(holder, node, start)
    if ready_s is None:
        return None
    return prompt_part(request, meeting(request, node, start), ready_s, holder.name)


def prompt_part(
    request: RoutedRequest, met: Meeting, ready_s: float = 0.0, fetch_from: str | None = None
) -> PromptPart:
    """The prompt from where the node starts; its state is there after `ready_s`, if need be from another node."""
    node, start, own_s, waiting = met
    costs, load, gap_s = node.costs, node.load, request.objectives.token_gap_s
    num_tokens = request.num_tokens - start
    steps = pace(node, load.num_decoding, load.context_tokens, gap_s, own_s / num_tokens)
    node_s = own_s + own_s / steps.step_work_s * costs.chunk_s
    if gap_s is None:
        delayed = load.num_decoding + stall_weight(load) * load.shortness
    else:
        share = steps.step_work_s / (steps.step_work_s + steps.overhead_s) / WHOLE_SHARE
        delayed = max(WITHIN_GAP_WEIGHT, min(1.0, share * share)) * load.num_decoding
    has_room = load.free_tokens >= 0 and load.free_slots >= 0
    in_line = waiting.weighed(AHEAD_WEIGHT if has_room else PROMPT_WEIGHT, PROMPT_WEIGHT)
    others_s = node_s * (1.0 + delayed + in_line)
    others_s += costs.token_s * STORED_WEIGHT * num_tokens
    if fetch_from is not None:
        others_s += received_s(request, node, start - node.hit.attention_tokens)
    computing_s = steps.seconds(own_s)
    wait_s = first_token_s(steps, waiting, own_s) - computing_s
    # What is fetched arrives while the prompt waits for its turn.
    arrival_s = (ready_s if ready_s > wait_s else wait_s) + computing_s
    # A prompt that others overtake makes as much time for them as it loses: it is no dearer for that.
    late_s = overtaken_s(load, steps, num_tokens, own_s / num_tokens, wait_s + computing_s)
    seconds = arrival_s + others_s
    return PromptPart(node, arrival_s + late_s, others_s, num_tokens, steps.keeps_gap, fetch_from, seconds)


def answer_part(request: RoutedRequest, met: Meeting) -> AnswerPart:
    """The answer, generated on this node, whoever computes the prompt."""
    node, waiting = met.node, met.waiting
    costs, load, gap_s = node.costs, node.load, request.objectives.token_gap_s
    number = max(request.answer_tokens, 1)
    num_steps = number * load.answer_pace  # as long as these are without drafts
    num_tokens = request.num_tokens + number
    mean_tokens = request.num_tokens + number // 2
    batch, context_tokens = answers_at_once(load, costs, num_steps)
    each_s = met.work_s / (request.num_tokens - met.start)
    after = pace(node, batch + 1, context_tokens + mean_tokens, gap_s, each_s)
    rest_s = answer_s = num_steps * after.decode_s
    slowed_s = costs.decode_s + costs.context_s * mean_tokens
    others_s = batch * num_steps * slowed_s
    is_meant_for_prompts = node.role is Role.PREFILL
    if load.waiting_tokens or is_meant_for_prompts:
        # Prompts that wait here are computed between the answer's steps.
        prompts_s = after.step_work_s + costs.chunk_s
        waiting_s = stalled_s = after.seconds(waiting.work_s)
        most_s = num_steps / load.step_stretch * prompts_s
        if is_meant_for_prompts:
            # The share of the time in which prompts wait is a smaller one of the steps: those with prompts are longer.
            share = load.prompt_share
            share_of_steps = (
                share if share >= 1.0 else share * after.drafted_s / (after.drafted_s + (1.0 - share) * prompts_s)
            )
            stalled_s = max(stalled_s, share_of_steps * most_s)
        stalled_s = stalled_s if stalled_s < most_s else most_s
        rest_s += stalled_s
        work_s = waiting.work_s if waiting.work_s > met.work_s else met.work_s
        lost, num_prompts = lost_share(node, after, after.drafted_s, gap_s, each_s, work_s), waiting.number
        if is_meant_for_prompts:
            meant = min(MOST_MEANT, share / (1.0 - share)) if share < 1.0 else MOST_MEANT
            if num_prompts < meant:
                num_prompts = meant
            elif waiting_s < rest_s:  # what waits now is done before a long answer is
                num_prompts = meant + (num_prompts - meant) * waiting_s / rest_s
            work_s = max(work_s, num_prompts * met.work_s)
        elif batch:  # one answer more costs prompts little where many are generated anyway: they share what all cost
            more_s = load.step_stretch * slowed_s
            lost = max(lost_share(node, after, more_s, gap_s, each_s, work_s), lost / (batch + 1))
        others_s += (HOSTED_WEIGHT if is_meant_for_prompts else 1.0) * num_prompts * lost * rest_s
        if gap_s is None:
            tokens = number if number > SHORT_ANSWER_TOKENS else SHORT_ANSWER_TOKENS
            others_s += stall_weight(load) * stalled_s / tokens
    copied_s = received_s(request, node, request.num_tokens - node.hit.attention_tokens)
    wait_s = place_wait_s(node, num_tokens, answer_s)
    seconds = wait_s + rest_s + others_s + copied_s
    # As much less of the others fits in meanwhile. In a full node that computes prompts, too, another request would
    # use that room at once; one for answers alone gets its prompts from others anyhow.
    is_full = (load.free_tokens < num_tokens or load.free_slots < 1) and node.role is not Role.DECODE
    room_tokens = load.free_tokens + load.context_tokens + load.coming_tokens
    room_share = 1.0 if is_full or room_tokens <= num_tokens else num_tokens / room_tokens
    held_share = room_share * (batch + PROMPT_WEIGHT * waiting.number)
    return AnswerPart(node, wait_s, rest_s, others_s, copied_s, held_share, after.decode_s, seconds)


def stall_weight(load: Load) -> float:
    """How many times more a second counts in which an answer waits for prompts at this node, divided by its tokens."""
    answers = load.num_decoding + load.num_coming
    return STALL_WEIGHT * MOST_STALLED / answers if answers > MOST_STALLED else STALL_WEIGHT


def received_s(request: RoutedRequest, node: Candidate, num_tokens: int) -> float:
    """Work that later requests there have to do for the second copy of so many tokens."""
    if num_tokens <= 0:
        return 0.0
    weight = RECEIVED_WEIGHT if node.load.empty_tokens >= num_tokens else DISPLACING_WEIGHT
    weight *= SHORT_WEIGHT if request.caches_are_short else 1.0
    return weight * node.costs.token_s * num_tokens


def gap_relief_s(request: RoutedRequest, node: Candidate, step_s: float, answers: tuple[float, float]) -> float:
    """Seconds until so many answers of a node have ended that a step of `step_s` is within the token gap; infinite if
    not even an idle node keeps it.

    answers   those that the step was predicted for beside this one's, and the tokens of their contexts
    """
    gap_s, (number, num_tokens) = request.objectives.token_gap_s, answers
    if gap_s is None or step_s <= gap_s:
        return 0.0
    of_each_s = node.costs.decode_s + node.costs.context_s * num_tokens / max(number, 1)
    ended = (step_s - gap_s) / of_each_s if of_each_s else math.inf
    num_steps = max(request.answer_tokens, 1) * node.load.answer_pace
    return math.inf if ended > number else ended / number * num_steps * step_s


def hand_over_s(request: RoutedRequest, sender: Candidate, receiver: Candidate) -> float | None:
    """Seconds from the first token until the receiver can decode; None if the sender cannot send to it.

    Blocks travel while the prompt is computed: the last chunk's and the state come after it.
    """
    link = sender.links.get(receiver.name)
    if link is None:
        return None
    lacking = max(0, request.num_tokens - receiver.hit.attention_tokens)
    return link.seconds(min(lacking, sender.chunk_tokens) * sender.bytes_per_token + sender.state_bytes)


def held_back_s(request: RoutedRequest, answer: AnswerPart, hand_over_s: float) -> float:
    """Seconds from the first token of a prompt that is handed over until the client gets it: at once, or where a token
    gap is asked for with the next one. That waits for the hand-over, for half of a step, and for its own."""
    if request.objectives.token_gap_s is None:
        return 0.0
    load = answer.node.load
    step_s = answer.rest_s / max(request.answer_tokens, 1) * load.step_stretch / load.answer_pace
    return hand_over_s + 1.5 * step_s


def fetch_s(holder: Candidate, receiver: Candidate, num_tokens: int) -> float | None:
    """Seconds in which the receiver gets the holder's checkpoint at `num_tokens` and the blocks below it that it lacks;
    None if the holder cannot send to it."""
    link = holder.links.get(receiver.name)
    if link is None:
        return None
    lacking = max(0, num_tokens - receiver.hit.attention_tokens)
    return link.seconds(lacking * holder.bytes_per_token + holder.state_bytes)
