"""The drafts of an engine's steps: when they are made, and whether the host knows the tokens before them by then.

With a layer that drafts ahead, the device waits for the host neither when drafting begins nor when it ends:

    step without drafts, its passes -> check, its passes -> check ... -> check, its passes -> step without drafts

The last step has no drafts, but it follows a check. So its tokens find their places on the device, as those of a check
do, and the step is timed and priced as a check.
"""

from __future__ import annotations

from headrace.cache.publishing import ScheduledChunk
from headrace.cache.tails import BehindCheck
from headrace.engine.drafts.drafting import Drafting
from headrace.engine.sequence import Sequence
from headrace.engine.settling import EngineTokens
from headrace.engine.step import InFlight


class EngineDrafts(EngineTokens):
    """The part of an engine that has sequences draft for the next step; `Engine` sets what it goes by.

    _overlap   a step may be launched before the tokens of the one before are known
    _turn_s    when the step that is being made began; noted for drafts alone
    _in_step   chunks of the step under way and of the one that is being made
    """

    _overlap: bool
    _turn_s: float
    _in_step: list[ScheduledChunk[Sequence]]

    def _draft(self, drafting: Drafting) -> None:
        """Has the sequences that decode draft for the next step.

        If the layer has drafted behind the step in flight, and the next step may follow it (`_may_follow`), the next
        step takes these drafts: the host need not know the tokens before them.

        Otherwise drafts follow known tokens. If the step in flight is a check, the engine waits for its tokens. If it
        has no drafts, the engine waits only where drafting is likely to pay. Even then it does not wait if answers go
        on in the step in flight and the layer can draft behind the next one: the step after that has drafts.
        """
        now_s, fit = self._clock(), self.cost_fit
        self._turn_s = now_s
        if self._in_flight is not None:
            if drafting.rows_ahead and self._may_follow(decoding := self._decoding):
                self._draft_behind(self._in_flight, drafting, set(decoding), now_s)
                drafting.seconds += self._clock() - now_s
                return
            if not self._in_flight.has_drafts:
                drafting.forget()
                would_draft = drafting.would_draft(self._running, self._in_flight.inputs.draw_index, fit, now_s)
                drafting.seconds += self._clock() - now_s
                if not would_draft:
                    return
                goes_on = self._in_flight.shape.num_decoding > 0
                if goes_on and drafting.will_draft_ahead() and self._may_follow(self._decoding):
                    return
            self._know_tokens()
            now_s = self._clock()
        drafting.forget()
        drafting.propose(self._running, fit, now_s)
        self._cut_drafts()
        drafting.seconds += self._clock() - now_s

    @property
    def _decoding(self) -> list[Sequence]:
        return [each for each in self._running if not each.is_prefilling and not each.is_paused]

    def _may_follow(self, decoding: list[Sequence]) -> bool:
        """True if a step behind drafts, or with some, may be launched before the tokens under way are known."""
        if not self._overlap or self._tail_rows is None or not decoding:
            return False
        num_missing = sum(sequence.tail is None for sequence in decoding)  # with too few, states would be written now
        return (
            len(decoding) <= self._scheduler.max_running
            and num_missing <= self._tail_rows.num_free
            # Those with one draw for all tokens draw alike, which is known without asking.
            and all(sequence.same_draw is not None or sequence.draws_alike for sequence in decoding)
        )

    def _draft_behind(self, step: InFlight, drafting: Drafting, decoding: set[Sequence], now_s: float) -> None:
        """Has sequences draft behind the step in flight.

        If slots are too few for the states behind drafts, a check in flight settles first, which frees its slots. Then
        drafts are shortened where a slot is still missing.
        """
        rows = drafting.rows_ahead
        pending = dict.fromkeys(step.inputs.draw_index, 1)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.num_drafts and sequence in decoding:
                assert chunk.tail is not None, "a model with an MTP layer keeps tails"
                slot = chunk.draft_slots[0] if chunk.draft_slots else sequence.held.slot
                sequence.behind = BehindCheck(rows[sequence], chunk.num_drafts, chunk.tail.written, slot)
                pending[sequence] = 1 + chunk.num_drafts
        drafting.forget()
        drafting.propose(self._running, self.cost_fit, now_s, pending)
        num_free = self.cache.draft_slots.num_free  # each takes one at most, as it keeps a tail
        if len(decoding) > num_free and sum(map(self._num_draft_slots, decoding)) > num_free:
            if step.has_drafts:
                self._know_tokens()
            self._cut_drafts()
        drafting.steps_followed += step.has_drafts and self._in_flight is not None

    def _know_tokens(self) -> None:
        self._take_in_flight()
        self._in_step = []

    def _cut_drafts(self) -> None:
        """Shortens drafts for which no slot is left, so that the state at the next boundary does not rest on one."""
        if self._tail_rows is None:
            return
        num_left = self.cache.draft_slots.num_free
        for sequence in self._running:
            if self._num_draft_slots(sequence):
                if num_left:
                    num_left -= 1
                else:
                    at, interval = sequence.num_computed, self._tail_rows.interval
                    sequence.drafts = sequence.drafts[: interval - at % interval - 2]

    def _num_draft_slots(self, sequence: Sequence) -> int:
        """Slots that a step needs for states that rest on a sequence's drafts."""
        if self._tail_rows is None:
            return len(sequence.drafts)
        at, interval = sequence.num_computed, self._tail_rows.interval
        if sequence.behind is not None:  # one for wherever it turns out to stand
            num_before = interval - (at + 1) % interval
            return int(num_before <= 1 + sequence.behind.num_drafts + len(sequence.drafts))
        num_before = interval - at % interval  # tokens before the state that is written next; the first is no draft
        return int(1 < num_before <= 1 + len(sequence.drafts) and sequence.held.source is None)
