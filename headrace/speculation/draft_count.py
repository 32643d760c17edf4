"""How many tokens a step's sequences draft, by how often drafts were right and by what steps cost. Pure: no clock.

A draft's chance is that it and all before it are right. The step takes the drafts with the best chances, as many as
give the most tokens a second:

    (sequences + chances of the drafts) / (seconds of the step without drafts + of drafting at all + of each draft)

Where prompts wait, drafts take time from these in a step that has a limit. So tokens of both count, in seconds of work:
those of prompts by what they take, each of an answer by what it would take of a step without drafts:

    (token's seconds * (sequences + chances of the drafts) + seconds of prompts) / seconds of all the step

It takes none where that is not GAIN better than without. Then nothing more would be learnt, so now and then a step
*probes* with a draft of each sequence: in all, probes take PROBE_SHARE of the time. So one does, more seldom, where a
limit leaves no room for drafts: that they take so long may have been an exception.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

GAIN = 1.02
PROBE_SHARE = 0.005
LATE_PROBE_SHARE = 0.002
"""The same of probes beyond the step's limit: of the gaps between tokens less than a hundredth is longer for them."""
LOOK_TURNS = 8
"""Turns until the number is chosen anew where nothing is drafted: choosing costs the host time, too."""

FIRST_RATE, FIRST_TRIES = 0.7, 4.0
"""Share of accepted drafts before anything is known, and the tries that it counts for."""
OWN_TRIES, OWN_PRIOR_TRIES = 32, 4.0
NODE_TRIES = 512
"""Tries that are remembered: a sequence goes from quoting to thinking within a sentence, a node's requests do not."""
FORCED_RATE = 0.95
"""The same of tokens that a grammar forces: the text is certain, how it is cut into tokens is not."""
LATE_STEPS, LATE_PROBES = 16, 4
"""Steps over which the time beside the predicted one is averaged, and probes, of which there are few."""
MOST_LATE = 4.0
"""Times the predicted seconds that one step may be late for its average: a first launch is later."""


class Acceptance:
    """How often drafts were right, by their place in a step: of the latest ones, about `remembered` at each place.

    A draft behind a wrong one was not tried.
    """

    def __init__(self, remembered: int) -> None:
        self._kept = 1 - 1 / remembered
        self._tried: list[float] = []
        self._right: list[float] = []

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a step's drafts, of which the leading ones were accepted."""
        num_tried = min(num_accepted + 1, num_drafts)
        while len(self._tried) < num_tried:
            self._tried.append(0.0)
            self._right.append(0.0)
        for place in range(num_tried):
            self._tried[place] = self._kept * self._tried[place] + 1
            self._right[place] = self._kept * self._right[place] + (place < num_accepted)

    def rate(self, place: int, prior: float, prior_tries: float) -> float:
        """The share that is right of the drafts at a place behind right ones."""
        if place >= len(self._tried):
            return prior
        return (self._right[place] + prior_tries * prior) / (self._tried[place] + prior_tries)


class Offer(NamedTuple):
    """Drafts that one sequence may have.

    record       how often its drafts were right
    most         drafts at most
    is_forced    its grammar leaves no other text: whatever was right before says nothing about these
    """

    record: Acceptance
    most: int
    is_forced: bool = False


@dataclass(frozen=True)
class PromptWork:
    """Seconds of prompts' tokens beside the answers of a step.

    most_s     that wait, and that it computes if its limit leaves room
    least_s    that it computes in any case
    answer_s   that prompts have less for each answer without drafts: what its token is worth
    """

    most_s: float
    least_s: float
    answer_s: float


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step.

    num_decoding   tokens that it gives without drafts
    plain_s        without drafts and tokens of prompts
    first_s        more for drafting at all
    after_s        more of a step without drafts that follows, where that is launched before this one's tokens are known
    draft_s        more for each draft
    limit_s        that it may be predicted to take; inf: any
    late_s         by which a step may end later than predicted: `limit_s` leaves room for that
    prompts        None: no prompt waits
    """

    num_decoding: int
    plain_s: float
    first_s: float
    draft_s: float
    limit_s: float
    late_s: float = 0.0
    after_s: float = 0.0
    prompts: PromptWork | None = None

    def of(self, num_drafts: int) -> float:
        return self.plain_s + (self.first_s + self.draft_s * num_drafts if num_drafts else 0.0)

    def speed(self, num_drafts: int, num_tokens: float) -> float:
        """Tokens a second, or where prompts wait seconds of work a second, of a step with these drafts that gives
        `num_tokens` of answers."""
        seconds, work = self.of(num_drafts), num_tokens
        if self.prompts is not None:
            prompts_s = min(self.prompts.most_s, max(self.prompts.least_s, self.limit_s - seconds))
            seconds, work = seconds + prompts_s, self.prompts.answer_s * num_tokens + prompts_s
        return work / seconds if seconds > 0 else math.inf

    def fitting(self, most: int) -> int:
        """The most drafts of these that the limit admits."""
        left_s = self.limit_s - self.plain_s - self.first_s
        if self.prompts is not None:
            left_s -= self.prompts.least_s
        if left_s < 0:
            return 0
        return most if self.draft_s * most <= left_s else int(left_s / self.draft_s)


class DraftCount(Protocol):
    """Chooses how many tokens the sequences of a step draft, and hears what became of them."""

    def rests(self) -> bool:
        """True if drafters need not be asked in this turn: what they find would not be drafted."""
        ...

    def counts(self, offers: Sequence[Offer], price: StepPrice, now_s: float) -> list[int]:
        """Drafts of each sequence that has something to draft. All 0 where drafting does not pay."""
        ...

    def drafted(self, num_drafts: int) -> bool:
        """So many drafts are in the step after `counts`: fewer than chosen, perhaps none, if tokens came meanwhile.

        Returns True if they are a probe.
        """
        ...

    def verified(self, offer: Offer, num_accepted: int) -> None:
        """Counts an offer's `most` drafts, all of which were in a step, and the leading ones of which were accepted."""
        ...

    def took(
        self, seconds: float, predicted_s: float, *, has_drafts: bool, has_prompts: bool, is_probe: bool = False
    ) -> None:
        """A step took so long from the end of the one before, drafting included."""
        ...


class FixedCount:
    """As many drafts as there are, shared evenly: `max_step_drafts` of all sequences, within the step's limit."""

    def __init__(self, max_step_drafts: int) -> None:
        self._max_step_drafts = max_step_drafts

    def rests(self) -> bool:
        return False

    def counts(self, offers: Sequence[Offer], price: StepPrice, now_s: float) -> list[int]:
        left, counts = price.fitting(self._max_step_drafts), []
        share = max(1, left // max(1, len(offers)))
        for offer in offers:
            counts.append(min(offer.most, share, left))
            left -= counts[-1]
        return counts

    def drafted(self, num_drafts: int) -> bool:
        return False

    def verified(self, offer: Offer, num_accepted: int) -> None:
        """Nothing depends on it."""

    def took(
        self, seconds: float, predicted_s: float, *, has_drafts: bool, has_prompts: bool, is_probe: bool = False
    ) -> None:
        """Nothing depends on it."""


class AutoCount:
    """As many drafts as pay, at most `max_step_drafts` of all sequences, within the step's limit."""

    def __init__(self, max_step_drafts: int) -> None:
        self._max_step_drafts = max_step_drafts
        self._seen, self._forced = Acceptance(NODE_TRIES), Acceptance(NODE_TRIES)
        self._late_s: defaultdict[tuple[bool, bool], float] = defaultdict(float)
        """By whether a step has drafts, and prompts: seconds beside the predicted ones, on average."""
        self._turns_to_rest = 0
        self._probe: tuple[StepPrice, float] | None = None  # the step that is being made is one: its price, and when
        self._no_probe_before_s = -math.inf

    def rests(self) -> bool:
        self._turns_to_rest = max(0, self._turns_to_rest - 1)
        return self._turns_to_rest > 0

    def counts(self, offers: Sequence[Offer], price: StepPrice, now_s: float) -> list[int]:
        if not offers:
            return []
        measured = self._measured(price)
        counts = best_counts(self._chances(offers), measured, self._max_step_drafts)
        self._probe = None
        if any(counts) or self._turns_to_rest:
            return counts
        if now_s < self._no_probe_before_s:
            self._turns_to_rest = LOOK_TURNS
            return counts
        self._probe = measured, now_s
        most = measured.fitting(self._max_step_drafts) or 1  # one shows how long such steps take
        return [int(row < most) for row in range(len(offers))]

    def drafted(self, num_drafts: int) -> bool:
        """A probe that waited for tokens and then found nothing has cost as much as one with a draft."""
        if self._probe is None:
            return False
        (price, now_s), self._probe = self._probe, None
        extra_s = max(0.0, price.of(max(1, num_drafts)) - price.of(0)) + price.after_s
        share = PROBE_SHARE if price.fitting(1) else LATE_PROBE_SHARE
        self._no_probe_before_s = now_s + extra_s / share
        self._turns_to_rest = LOOK_TURNS
        return True

    def verified(self, offer: Offer, num_accepted: int) -> None:
        if offer.is_forced:
            self._forced.add(offer.most, num_accepted)
            return
        offer.record.add(offer.most, num_accepted)
        self._seen.add(offer.most, num_accepted)
        if num_accepted:
            self._turns_to_rest = 0

    def took(
        self, seconds: float, predicted_s: float, *, has_drafts: bool, has_prompts: bool, is_probe: bool = False
    ) -> None:
        late_s, kind = min(seconds - predicted_s, MOST_LATE * predicted_s), (has_drafts, has_prompts)
        self._late_s[kind] += (late_s - self._late_s[kind]) / (LATE_PROBES if is_probe else LATE_STEPS)

    def _measured(self, price: StepPrice) -> StepPrice:
        has_prompts = price.prompts is not None
        plain_late_s, late_s = self._late_s[False, has_prompts], self._late_s[True, has_prompts]
        plain_s = max(0.0, price.plain_s + plain_late_s)
        first_s = max(0.0, price.first_s + late_s - plain_late_s)
        later_s = plain_s + first_s - price.plain_s - price.first_s  # which the limit need not leave room for again
        limit_s = price.limit_s + min(price.late_s, max(0.0, later_s))
        return replace(price, plain_s=plain_s, first_s=first_s, limit_s=limit_s)

    def _chances(self, offers: Sequence[Offer]) -> list[list[float]]:
        """Chances of each offer's drafts: that it and all before it are right."""
        most = max((offer.most for offer in offers), default=0)
        seen, forced = [FIRST_RATE], [FORCED_RATE]
        for place in range(most):
            seen.append(self._seen.rate(place, seen[-1], FIRST_TRIES))
            forced.append(self._forced.rate(place, forced[-1], FIRST_TRIES))
        chances = []
        for offer in offers:
            if offer.is_forced:
                rates = forced[1 : offer.most + 1]
            else:
                rates = [offer.record.rate(place, seen[place + 1], OWN_PRIOR_TRIES) for place in range(offer.most)]
            chances.append(list(accumulate(rates, mul)))
        return chances


def best_counts(chances: Sequence[Sequence[float]], price: StepPrice, max_step_drafts: int) -> list[int]:
    """The number of drafts of each sequence that does the most in a second; all 0 if that is none.

    chances   of each sequence's drafts, in their order, none larger than the one before
    """
    counts = [0] * len(chances)
    offers = [(chance, -place, row) for row, each in enumerate(chances) for place, chance in enumerate(each)]
    offers.sort(reverse=True)
    tokens = float(price.num_decoding)
    best, best_speed = 0, GAIN * price.speed(0, tokens)
    for number, (chance, _, _) in enumerate(offers[: price.fitting(max_step_drafts)], 1):
        tokens += chance
        speed = price.speed(number, tokens)
        if speed >= best_speed:
            best, best_speed = number, speed
    for _, _, row in offers[:best]:
        counts[row] += 1
    return counts
