"""Drafts of the next step: which sequences have some, and how many. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple, Protocol

from headrace.cache.publishing import ScheduledChunk
from headrace.engine.drafts.ahead import FutureDrafts
from headrace.engine.sampling.sampler import OnDevice
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.scheduling.cost_fit import CostFit
from headrace.engine.scheduling.scheduler import smallest_gap_s
from headrace.engine.sequence import Sequence
from headrace.forward.sequence_input import SequenceInput
from headrace.speculation.draft_count import OWN_TRIES, Acceptance, DraftCount, Offer, PromptWork, StepPrice
from headrace.speculation.drafter import DrafterFactory
from headrace.step_costs import StepCosts, StepShape

PLACES = ("1", "2", "3", "4", "5", "6", "7", "8+")
"""Places of drafts behind the newest token, as metrics name them."""


NOTHING: Mapping[Sequence, int] = {}


class Guess(NamedTuple):
    """Tokens that a grammar or a drafter expects behind a sequence's.

    next     its token that is still under way; None: none is
    drafts   after that one
    """

    next: int | None
    drafts: list[int]


class Chosen(NamedTuple):
    """Drafts that the next step is to have.

    offers    of each sequence that may have some: as many as there are, or may be made
    guesses   the tokens of these, where they are known; those of all others the model's layer makes
    counts    drafts of each sequence that is to have some
    """

    offers: dict[Sequence, Offer]
    guesses: dict[Sequence, Guess]
    counts: dict[Sequence, int]

    @property
    def by_layer(self) -> dict[Sequence, int]:
        """Drafts that the layer is to make, so many of each sequence."""
        if not self.guesses:
            return self.counts
        return {sequence: count for sequence, count in self.counts.items() if sequence not in self.guesses}

    @property
    def num_passes(self) -> int:
        """Passes of the layer that make these drafts: the most of one sequence."""
        return max(self.by_layer.values(), default=0)


class LayerDrafts(Protocol):
    """A layer of the model that drafts for all sequences of a step at once."""

    def drafts(self, wanted: Mapping[Sequence, int], num_running: int) -> list[SequenceOf[int]]:
        """Drafts of each sequence in `wanted`, at most as many as its number there.

        If drafts were made ahead, returns those, and none for the other sequences. Their values may still be on their
        way: whoever reads one waits for it. Otherwise makes drafts now, behind known tokens, and waits for the device.

        num_running   sequences that may need a block in the step: drafts leave a block for each
        """
        ...

    def draft_ahead(
        self,
        step: SequenceOf[tuple[Sequence, SequenceInput]],
        first_draws: Mapping[Sequence, int],
        num_passes: int,
        num_running: int,
    ) -> OnDevice | None:
        """Begins to draft for the next call of `drafts`, behind the step that was just launched. Waits for nothing.

        Returns what it began; None: nothing.

        step          sequences of that step, and their parts of it: those that decode get drafts
        first_draws   of each of them, the draw behind its newest token
        num_passes    drafts of each; 0 if the next step is not likely to have drafts
        """
        ...

    @property
    def rows_ahead(self) -> Mapping[Sequence, int]:
        """The rows of those whose drafts are being made for the next call of `drafts`."""
        ...

    def took(self, sequence: Sequence) -> None:
        """Tokens have been appended to a sequence that drafts."""
        ...


class Drafting:
    """Asks grammars and drafters for the next tokens of decoding sequences, and counts how many were accepted.

    drafter           a function that makes the drafter of one sequence, called when the sequence first drafts; or a
                      layer of the model that drafts for all sequences, once the number of drafts is chosen. None: only
                      tokens that a grammar forces are drafted
    count             chooses how many drafts a step tries
    max_drafts        most drafts of one sequence in a step
    block_size        fewest tokens of prompts that a step with drafts is counted on to compute, if prompts wait
    max_step_tokens   most tokens of prompts that it is counted on to compute
    """

    def __init__(
        self,
        drafter: DrafterFactory | LayerDrafts | None,
        count: DraftCount,
        *,
        max_drafts: int,
        block_size: int,
        max_step_tokens: int,
        rules: StopRules,
    ) -> None:
        self._layer: LayerDrafts | None = None
        self._new_drafter: DrafterFactory | None = None
        if callable(drafter):
            self._new_drafter = drafter
        else:
            self._layer = drafter
        self.count = count
        self._max_drafts = max_drafts
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._rules = rules
        self._guesses: list[tuple[Sequence, Offer, int, int]] = []  # tokens under way, and the places they are to have
        self._num_ahead = 0  # drafts of each sequence to make behind the next launch
        self._num_asked = 0  # the same of the last launch, whether the layer could or not
        self._drafted: dict[Sequence, Offer] = {}  # those of the step that is being made
        self._is_probe = False  # that step, if it has drafts in the end
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._num_checks: Counter[tuple[int, int]] = Counter()  # of so many drafts, with so many accepted
        self.seconds = 0.0  # of the host, for asking and choosing; a settled step's are not in them
        self.steps = 0  # with drafts
        self.steps_followed = 0  # of these, those behind which the next one was made before their tokens were known

    def would_draft(
        self, running: Collection[Sequence], pending: Collection[Sequence], fit: CostFit, now_s: float
    ) -> bool:
        """True if it pays to draft behind the tokens in flight, one for each of the `pending` sequences.

        The host does not know these tokens yet. Grammars and drafters guess them, too, and draft behind the guess; once
        the token is known, `propose` counts whether the guess was right. The layer drafts behind the token itself.
        """
        chosen = self._chosen(running, dict.fromkeys(pending, 1), fit, now_s)
        self._guesses = [
            (sequence, chosen.offers[sequence], guess.next, len(sequence.tokens))
            for sequence, guess in chosen.guesses.items()
            if guess.next is not None and sequence in chosen.counts
        ]
        self._num_ahead = chosen.num_passes
        return bool(chosen.counts)

    def will_draft_ahead(self) -> bool:
        """True if the layer makes the drafts that `would_draft` found behind the next launch, for the step after it.

        Not where it made none the last time: the device may lack memory, or a captured pass of that size.
        """
        return self._num_ahead > 0 and not self._num_asked

    def propose(
        self, running: Collection[Sequence], fit: CostFit, now_s: float, pending: Mapping[Sequence, int] = NOTHING
    ) -> None:
        """Sets the `drafts` of these sequences; no other sequence has any.

        pending   tokens of each that are under way, at most; of them the layer has `rows_ahead`
        """
        guesses, self._guesses = self._guesses, []
        for sequence, offer, token_id, position in guesses:
            if position < len(sequence.tokens):
                self.count.verified(_part(offer, 1), int(sequence.tokens[position] == token_id))
        num_drafts = 0
        chosen = self._chosen(running, pending, fit, now_s)
        for sequence, drafts in self._made(chosen, len(running)):
            if sequence.grammar is not None:
                drafts = tuple(sequence.grammar.allowed([*drafts]))
            if number := len(drafts):
                sequence.drafts = drafts if isinstance(drafts, FutureDrafts) else tuple(drafts)
                self._drafted[sequence] = chosen.offers[sequence]
                num_drafts += number
        self._is_probe = self.count.drafted(num_drafts)
        self._num_ahead = chosen.num_passes if num_drafts else 0

    @property
    def rows_ahead(self) -> Mapping[Sequence, int]:
        """As `LayerDrafts.rows_ahead`."""
        return NOTHING if self._layer is None else self._layer.rows_ahead

    def is_probe(self, offers: Mapping[Sequence, Offer]) -> bool:
        """True if the step that was proposed last, with these offers, is one by which `count` tries drafting anew."""
        return self._is_probe and bool(offers)

    def offers(self, chunks: Collection[ScheduledChunk[Sequence]]) -> dict[Sequence, Offer]:
        """Offers of the drafts of these chunks: what they were chosen from."""
        drafted = self._drafted
        return {each.sequence: _part(drafted[each.sequence], each.num_drafts) for each in chunks if each.num_drafts}

    def draft_ahead(
        self, step: SequenceOf[tuple[Sequence, SequenceInput]], first_draws: Mapping[Sequence, int], num_running: int
    ) -> OnDevice | None:
        """Has the layer draft behind a step that was just launched, if the next one is likely to have drafts.

        Returns its passes; None: there are none.
        """
        num_passes = self._num_asked = self._num_ahead
        self._num_ahead = 0
        if self._layer is None:
            return None
        return self._layer.draft_ahead(step, first_draws, num_passes, num_running)

    def forget(self) -> bool:
        """Takes back what was proposed last; False if that was nothing."""
        drafted, self._drafted, self._num_ahead = self._drafted, {}, 0
        for sequence in drafted:
            sequence.drafts = ()
        return bool(drafted)

    @property
    def checked_at(self) -> list[int]:
        """Drafts checked behind right ones, by their place in `PLACES`. Any thread may ask."""
        return self._at_places(lambda num_drafts, num_accepted: min(num_accepted + 1, num_drafts))

    @property
    def accepted_at(self) -> list[int]:
        """Drafts that were right, by the same places."""
        return self._at_places(lambda num_drafts, num_accepted: num_accepted)

    def _at_places(self, num_places: Callable[[int, int], int]) -> list[int]:
        """The leading places of each check that count, summed."""
        columns = [0] * len(PLACES)
        for check, number in self._num_checks.copy().items():
            for place in range(num_places(*check)):
                columns[min(place, len(PLACES) - 1)] += number
        return columns

    def verified(self, sequence: Sequence, offer: Offer, num_accepted: int) -> None:
        """Counts the drafts of one sequence in a step: all that were offered, and how many of them were right."""
        num_drafts = offer.most
        self.count.verified(offer, num_accepted)
        if self._layer is not None:
            self._layer.took(sequence)
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
        sequence.drafted_tokens += num_drafts
        sequence.accepted_tokens += num_accepted
        self._num_checks[num_drafts, num_accepted] += 1

    # ------------------------------------------------------------ choice

    def _chosen(
        self, running: Collection[Sequence], pending: Mapping[Sequence, int], fit: CostFit, now_s: float
    ) -> Chosen:
        chosen = self._found(running, pending)
        if offers := chosen.offers:
            counts = self.count.counts([*offers.values()], self._price(running, fit), now_s)
            chosen.counts.update(each for each in zip(offers, counts, strict=True) if each[1])
        return chosen

    def _found(self, running: Collection[Sequence], pending: Mapping[Sequence, int]) -> Chosen:
        """All that may be chosen from."""
        found, is_resting = Chosen({}, {}, {}), self.count.rests()
        for sequence in running:
            if sequence.is_paused or sequence.is_prefilling or (is_resting and sequence.grammar is None):
                continue
            if sequence.grammar is not None and not sequence.grammar.takes_drafts:
                continue
            num_pending = pending.get(sequence, 0)
            most = min(self._max_drafts, self._rules.most_new(sequence) - num_pending - 1)
            if most < 1:
                continue
            tokens = [] if sequence.grammar is None else sequence.grammar.forced()[: num_pending + most]
            is_forced = len(tokens) > num_pending
            if not is_forced and not is_resting:
                if self._layer is not None:
                    found.offers[sequence] = Offer(_acceptance(sequence), most)
                    continue
                tokens = self._guessed(sequence, num_pending + most)
            if drafts := tokens[num_pending:]:
                found.offers[sequence] = Offer(_acceptance(sequence), len(drafts), is_forced)
                found.guesses[sequence] = Guess(tokens[0] if num_pending else None, drafts)
        return found

    def _made(self, chosen: Chosen, num_running: int) -> Iterator[tuple[Sequence, SequenceOf[int]]]:
        """The drafts of each sequence, as many as were chosen; the layer makes its own now, perhaps fewer."""
        if self._layer is not None:
            wanted = chosen.by_layer
            yield from zip(wanted, self._layer.drafts(wanted, num_running), strict=True)
        for sequence, guess in chosen.guesses.items():
            if count := chosen.counts.get(sequence):
                yield sequence, guess.drafts[:count]

    def _guessed(self, sequence: Sequence, most: int) -> list[int]:
        if self._new_drafter is None:
            return []
        if sequence.drafter is None:
            sequence.drafter = self._new_drafter(sequence.request)
        return [*sequence.drafter.propose(sequence.tokens, most)][:most]

    def _price(self, running: Collection[Sequence], fit: CostFit) -> StepPrice:
        """Price of the next step."""
        costs = fit.costs
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in running:
            if sequence.is_prefilling:
                prefilling.append(sequence)
            elif not sequence.is_paused:
                decoding.append(sequence)
        plain_s = costs.decode_part_s(StepShape(len(decoding), sum(len(sequence.tokens) for sequence in decoding)))
        prompts = None
        if prefilling:
            prompts = self._prompt_work(prefilling, costs, (plain_s - costs.step_s) / len(decoding))
            plain_s += costs.chunk_s
        gap_s, limit_s, late_s = smallest_gap_s(decoding), math.inf, 0.0
        if gap_s is not None:
            limit_s = costs.longest_s(gap_s)
            late_s = replace(costs, late_s=0.0).longest_s(gap_s) - limit_s
        return StepPrice(
            num_decoding=len(decoding),
            plain_s=plain_s,
            first_s=costs.check_s,
            draft_s=costs.draft_s,
            after_s=0.0 if self._layer is None else costs.check_s,
            limit_s=limit_s,
            late_s=late_s,
            prompts=prompts,
        )

    def _prompt_work(self, prefilling: list[Sequence], costs: StepCosts, answer_s: float) -> PromptWork:
        """Work that waits of these prompts, up to `max_step_tokens` of them, and a block of the first one."""
        first = min(prefilling, key=lambda each: each.arrival)
        block = StepShape.prefill(first.num_computed, first.num_computed + self._block_size)
        waiting = sum((StepShape.prefill(each.num_computed, each.prefill_length) for each in prefilling), StepShape())
        share = min(1.0, self._max_step_tokens / max(1, waiting.prefill_tokens))
        least_s, most_s = (costs.prefill_part_s(shape) - costs.chunk_s for shape in (block, waiting))
        return PromptWork(most_s=max(least_s, share * most_s), least_s=least_s, answer_s=answer_s)


def _part(offer: Offer, num_drafts: int) -> Offer:
    """The offer of so many of its drafts."""
    return offer if num_drafts == offer.most else offer._replace(most=num_drafts)


def _acceptance(sequence: Sequence) -> Acceptance:
    if sequence.acceptance is None:
        sequence.acceptance = Acceptance(OWN_TRIES)
    return sequence.acceptance
