"""The work of one node: by its last heartbeat, and by what this router has sent it and seen finished. Pure.

A heartbeat says how much work there is, of all routers; this router knows its own at any time. What a heartbeat says
beyond this router's own work at that moment is taken for others', until the next one. So what was sent after a
heartbeat counts at once, and what ended after it counts no more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from headrace.step_costs import PROMPT_SECONDS, StepCosts, StepShape
from headrace.wire.node_messages import NodeStatus
from router.routing.candidates import MIN_GAP_TOKENS, MIN_TOKEN_S, RECENT_S, SHORT_ANSWER_TOKENS, Load
from router.routing.draft_pace import DraftPace

LEAST_LEFT = 0.1
"""Share of a prompt that counts as left until its end is reported, however long it has been computed."""
REFRESH_S = 0.01
"""How long a load counts while nothing happens but progress."""


@dataclass(slots=True)
class Prompt:
    """A prompt that the node computes for this router, from token `start` up to `end`.

    is_started   its turn has come: it has blocks and a slot
    """

    start: int
    end: int
    is_started: bool = False


@dataclass(slots=True)
class Answer:
    """An answer that the node generates for this router, or will once its prompt of `num_tokens` is computed.

    is_alone          the same node computes the prompt
    is_admitted       the node has reserved blocks and a slot for it
    expected_tokens   of the answer alone
    token_gap_s       asked for between its tokens; None: any
    first_token_s     predicted when it was sent
    """

    num_tokens: int
    is_alone: bool
    is_admitted: bool = False
    is_generating: bool = False
    expected_tokens: int = SHORT_ANSWER_TOKENS
    token_gap_s: float | None = None
    first_token_s: float = 0.0


class _Share(NamedTuple):
    """One request's part of the work, or the sum of all. `held`: reserved by the node; `wanted`: that, or to come."""

    num_decoding: int = 0
    context_tokens: int = 0
    num_coming: int = 0
    coming_tokens: int = 0
    num_receiving: int = 0
    receiving_tokens: int = 0
    held_tokens: int = 0
    held_slots: int = 0
    wanted_tokens: int = 0
    wanted_slots: int = 0
    shortness: float = 0.0
    coming_s: float = 0.0


NOTHING = _Share()


class NodeBook:
    """Work by the numbers of this router's decisions."""

    def __init__(self) -> None:
        self.prompts: dict[int, Prompt] = {}
        self.answers: dict[int, Answer] = {}
        self._shares: dict[int, _Share] = {}
        self._own = NOTHING
        self._others = Load()
        self._others_at_s = 0.0
        self._tokens_per_s = 0.0
        self._prompt_share = 0.0
        self._prompt_use = 0.0
        self._prompt_s: float | None = None  # what the node has counted until its last heartbeat
        self._costs = StepCosts()
        self._drafts = DraftPace()
        self._recent_lengths: tuple[float, ...] = ()
        self._recent_at_s = 0.0
        self._in_turn: _InTurn | None = None  # the prompts as the node serves them
        self._progress_since_s: float | None = None  # since the node last finished a prompt, or began with the first
        self._load: Load | None = None
        self._load_until_s = 0.0

    def heartbeat(self, status: NodeStatus, block_size: int, chunk_tokens: int, now_s: float) -> None:
        """Takes over the node's own figures."""
        own, left = self._own, self._prompts_left(now_s)
        blocks, slots = status.blocks, status.slots
        self._note_prompts(status, now_s - self._others_at_s)
        self._forget_lengths(now_s)
        self._drafts.heartbeat(status, now_s - self._others_at_s)
        self._others_at_s = now_s
        self._others = Load(
            num_decoding=_beyond(status.num_decoding, own.num_decoding + own.num_receiving),
            context_tokens=_beyond(status.context_tokens, own.context_tokens + own.receiving_tokens),
            waiting_tokens=_beyond(status.waiting_tokens, left.tokens),
            waiting_depths=_beyond(status.waiting_depths, left.depths),
            waiting_lengths=_added(status.waiting_lengths, left.lengths, -1.0),
            num_waiting=max(0.0, _number_of(status.waiting_lengths) - len(self.prompts)),
            free_tokens=(blocks.free + blocks.cached) * block_size + own.held_tokens,
            free_slots=slots.free + slots.cached + own.held_slots,
            empty_tokens=blocks.free * block_size,
        )
        gaps_s = (each.token_gap_s for each in self.answers.values() if each.is_generating)
        gap_s = min((gap_s for gap_s in gaps_s if gap_s is not None), default=None)
        self._tokens_per_s = _tokens_per_s(status, self._drafts.stretch, chunk_tokens, gap_s)
        self._load = None

    def load(self, now_s: float) -> Load:
        """The node's work now."""
        if self._load is None or now_s >= self._load_until_s:
            others, own, left = self._others, self._own, self._prompts_left(now_s)
            tokens, depths, lengths, number = left.tokens, left.depths, left.lengths, float(len(self.prompts))
            if others.waiting_tokens:
                share = self._share_left(now_s)
                tokens += int(share * others.waiting_tokens)
                depths += int(share * others.waiting_depths)
                lengths = _added(lengths, others.waiting_lengths, share)
                number += share * others.num_waiting
            is_still = self._progress_since_s is None and not others.waiting_tokens
            self._load_until_s = math.inf if is_still else now_s + REFRESH_S
            self._load = Load(
                others.num_decoding + own.num_decoding,
                others.context_tokens + own.context_tokens,
                own.num_coming,
                own.coming_tokens,
                tokens,
                depths,
                lengths,
                number,
                self._recent_lengths,
                others.free_tokens - own.wanted_tokens,
                others.free_slots - own.wanted_slots,
                others.empty_tokens,
                own.shortness,
                self._prompt_share,
                self._prompt_use + (self._costs.token_s * tokens + self._costs.depth_s * depths) / RECENT_S,
                own.coming_s,
                self._drafts.pace,
                self._drafts.stretch,
            )
        return self._load

    def _note_prompts(self, status: NodeStatus, seconds: float) -> None:
        """Takes over how busy with prompts the node was since its last heartbeat."""
        forgotten, work_s = 1 - math.exp(-seconds / RECENT_S), status.counters.get(PROMPT_SECONDS)
        self._prompt_share += forgotten * ((status.waiting_tokens > 0) - self._prompt_share)
        if self._prompt_s is not None and work_s is not None and seconds > 0:
            self._prompt_use += forgotten * ((work_s - self._prompt_s) / seconds - self._prompt_use)
        self._prompt_s, self._costs = work_s, status.costs

    def _forget_lengths(self, now_s: float) -> None:
        kept = math.exp((self._recent_at_s - now_s) / RECENT_S)
        self._recent_lengths = tuple([kept * each for each in self._recent_lengths])
        self._recent_at_s = now_s

    # ------------------------------------------------------------ this router's work

    def add(self, number: int, prompt: Prompt | None, answer: Answer | None = None) -> None:
        """Adds what the node will do for a decision."""
        if prompt is not None:
            self.prompts[number] = prompt
        if answer is not None:
            self.answers[number] = answer
        self._changed(number)

    def admitted(self, number: int) -> None:
        """The node has reserved what the answer needs."""
        if (answer := self.answers.get(number)) is not None:
            answer.is_admitted = True
            self._changed(number)

    def started(self, number: int, now_s: float) -> None:
        """The prompt's turn has come."""
        if (prompt := self.prompts.get(number)) is not None:
            prompt.is_started = True
            if self._progress_since_s is None:
                self._progress_since_s = now_s
            self._changed(number)

    def generating(self, number: int) -> None:
        """The answer's prompt is computed."""
        if (answer := self.answers.get(number)) is not None:
            answer.is_admitted = answer.is_generating = True
            self._changed(number)

    def computed(self, number: int, now_s: float) -> None:
        """The prompt is computed; `end_prompt` follows."""
        if (prompt := self.prompts.get(number)) is not None and prompt.end > prompt.start:
            self._forget_lengths(now_s)
            num_tokens, recent = prompt.end - prompt.start, [*self._recent_lengths]
            recent += [0.0] * (num_tokens.bit_length() - len(recent))
            recent[num_tokens.bit_length() - 1] += num_tokens / RECENT_S
            self._recent_lengths = tuple(recent)

    def end_prompt(self, number: int, now_s: float) -> None:
        """The prompt is computed, or given up."""
        prompt = self.prompts.pop(number, None)
        if prompt is not None:
            if prompt.is_started:
                is_busy = any(each.is_started for each in self.prompts.values())
                self._progress_since_s = now_s if is_busy else None
            self._changed(number)

    def end_answer(self, number: int) -> None:
        if self.answers.pop(number, None) is not None:
            self._changed(number)

    def _changed(self, number: int) -> None:
        before, after = self._shares.pop(number, NOTHING), self._share(number)
        if after is not NOTHING:
            self._shares[number] = after
        total = _Share._make(map(operator.add, self._own, map(operator.sub, after, before)))
        self._own = total if self._shares else NOTHING  # sums of fractions leave rests
        self._load = self._in_turn = None

    def _share(self, number: int) -> _Share:
        prompt, answer = self.prompts.get(number), self.answers.get(number)
        if answer is None:
            if prompt is None:
                return NOTHING
            held = prompt.end if prompt.is_started else 0
            return _Share(held_tokens=held, held_slots=int(prompt.is_started), wanted_tokens=prompt.end, wanted_slots=1)
        tokens = answer.num_tokens
        is_held = answer.is_admitted or (prompt is not None and prompt.is_started)
        is_receiving = answer.is_admitted and not answer.is_generating and not answer.is_alone
        return _Share(
            num_decoding=int(answer.is_generating),
            context_tokens=tokens if answer.is_generating else 0,
            num_coming=int(not answer.is_generating),
            coming_tokens=0 if answer.is_generating else tokens,
            num_receiving=int(is_receiving),
            receiving_tokens=tokens if is_receiving else 0,
            held_tokens=tokens if is_held else 0,
            held_slots=int(is_held),
            wanted_tokens=tokens,
            wanted_slots=1,
            shortness=1 / max(answer.expected_tokens, SHORT_ANSWER_TOKENS),
            coming_s=0.0 if answer.is_generating else answer.first_token_s,
        )

    def _share_left(self, now_s: float) -> float:
        """Share of the others' prompts that the node cannot have computed since its heartbeat."""
        done = (now_s - self._others_at_s) * self._tokens_per_s
        return max(0.0, 1 - done / self._others.waiting_tokens)

    def _prompts_left(self, now_s: float) -> _Left:
        """Prompts that are still to be computed. What should have been since the last prompt ended is taken from
        those that have begun, shortest first, as the node serves them."""
        done = 0.0
        if self._progress_since_s is not None:
            done = (now_s - self._progress_since_s) * self._tokens_per_s
        if self._in_turn is None or done < self._in_turn.num_progressed:
            self._in_turn = _InTurn(self.prompts.values())
        return self._in_turn.after(int(done))


class _Left(NamedTuple):
    """The rest of this router's prompts; see `Load`."""

    tokens: int
    depths: int
    lengths: tuple[int, ...]


class _InTurn:
    """A node's prompts and their progress, in the order in which it serves them: begun ones first, the shortest first.

    num_progressed   tokens that count as computed, of prompts that have all the progress that they may have
    """

    def __init__(self, prompts: Collection[Prompt]) -> None:
        self.num_progressed = 0
        self._tokens = self._depths = 0
        most = max((each.end - each.start for each in prompts), default=0)
        self._lengths = [0] * (most.bit_length() + 1)
        for each in prompts:
            self._count(0, each.end - each.start, each.end)
        begun = ((each.end - each.start, each.end) for each in prompts if each.is_started)
        self._begun = sorted(begun, reverse=True)  # the next one last

    def after(self, num_done: int) -> _Left:
        """The rest, once so many tokens may have been computed: no fewer than at the last call."""
        begun = self._begun
        while begun:
            left, end = begun[-1]
            progress, num_more = int(left * (1 - LEAST_LEFT)), num_done - self.num_progressed
            if progress > num_more:
                self._count(left, left - num_more, end)
                found = self._left()
                self._count(left - num_more, left, end)
                return found
            begun.pop()
            self.num_progressed += progress
            self._count(left, left - progress, end)
        return self._left()

    def _left(self) -> _Left:
        return _Left(self._tokens, self._depths, tuple(self._lengths[1:]))

    def _count(self, before: int, now: int, end: int) -> None:
        """A prompt has so many tokens left, before its `end`."""
        self._tokens += now - before
        self._depths += (now * (2 * end - now - 1) - before * (2 * end - before - 1)) // 2
        self._lengths[before.bit_length()] -= before
        self._lengths[now.bit_length()] += now


def _beyond(theirs: int, mine: int) -> int:
    return max(0, theirs - mine)


def _added(lengths: Sequence[int], others: Sequence[int], share: float) -> tuple[int, ...]:
    """The lengths with a share of others, none below 0."""
    if not share or not others:
        return tuple(lengths)
    return tuple(max(0, each + int(share * other)) for each, other in zip_longest(lengths, others, fillvalue=0))


def _number_of(lengths: Sequence[int]) -> float:
    """How many prompts there are, about, by their tokens as a load gives them."""
    return sum(max(1.0, tokens / (1.5 * (1 << power))) for power, tokens in enumerate(lengths) if tokens)


def _tokens_per_s(status: NodeStatus, stretch: float, chunk_tokens: int, token_gap_s: float | None) -> float:
    """Tokens of prompts that the node computes in a second, in steps as full of them as the gap allows. Drafts make the
    answers of a step take `stretch` times as long."""
    costs, beside = status.costs, StepShape(status.num_decoding, status.context_tokens)
    depth = status.waiting_depths / max(status.waiting_tokens, 1)
    token_s = max(costs.token_s + costs.depth_s * depth, MIN_TOKEN_S)
    fixed_s = stretch * costs.decode_part_s(beside) + costs.chunk_s
    prompts_s = token_s * chunk_tokens
    if token_gap_s is not None and status.num_decoding:
        prompts_s = min(prompts_s, max(costs.longest_s(token_gap_s) - fixed_s, token_s * MIN_GAP_TOKENS))
    return prompts_s / token_s / (fixed_s + prompts_s)
