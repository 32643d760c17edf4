"""Stop conditions of a request, and the settings of its next token. Pure: no tensors, no clock."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from headrace.engine.sampling.draw import Draw
from headrace.engine.sequence import Sequence
from headrace.request import FinishReason


@dataclass(frozen=True)
class StopRules:
    """The model's stop conditions: ids that end an answer, and the most tokens of prompt and answer together."""

    eos_token_ids: tuple[int, ...]
    max_model_tokens: int

    def draw(self, sequence: Sequence, pending: int | None) -> Draw:
        """The draw of the next token. `pending`: the draw of the last launch that is not yet among its tokens."""
        sampling, tokens = sequence.request.sampling, sequence.tokens
        num_pending = int(pending is not None)
        too_early = sequence.num_output + num_pending < sampling.min_tokens
        # A grammar's mask has them already: it knows whether anything else is left.
        banned = self._stop_ids(sequence) if too_early and sequence.grammar is None else ()
        draw = Draw(sampling, len(tokens) + num_pending, banned, behind=sequence.behind)
        words, start = sequence.bad_words, sequence.request.num_prompt_tokens
        if words is None:
            return draw
        if pending is None:
            return draw._replace(banned=(*banned, *words.banned(tokens, start)))
        return draw._replace(banned_after=words.banned_after(tokens, start), pending=pending)

    def draw_after(self, sequence: Sequence, drafts: SequenceOf[int], pending: int | None) -> Draw:
        """The draw of the token after these drafts, if they follow its tokens, and the pending one as in `draw`. Where
        there are bad words, none is pending."""
        sampling, words = sequence.request.sampling, sequence.bad_words
        num_more = len(drafts) + int(pending is not None)
        too_early = sequence.num_output + num_more < sampling.min_tokens
        banned = self._stop_ids(sequence) if too_early and sequence.grammar is None else ()
        if words is not None:
            tokens = [*sequence.tokens, *drafts]
            banned = (*banned, *words.banned(tokens, sequence.request.num_prompt_tokens))
        return Draw(sampling, len(sequence.tokens) + num_more, banned, behind=sequence.behind)

    def unwanted(self, sequence: Sequence, num_drafts: int = 0) -> tuple[int, ...]:
        """Ids that a sequence, its tokens known, takes after so many drafts only if its grammar leaves no other."""
        sampling = sequence.request.sampling
        stops = self._stop_ids(sequence) if sequence.num_output + num_drafts < sampling.min_tokens else ()
        return (*stops, *self.eos_token_ids) if sampling.ignore_eos else stops

    def most_tokens(self, sequence: Sequence) -> int:
        """The most tokens of its prompt and its answer."""
        return min(sequence.most_tokens, self.max_model_tokens)

    def most_new(self, sequence: Sequence) -> int:
        """The most tokens that it may still take, all that it has being known."""
        return min(sequence.most_tokens, self.max_model_tokens) - len(sequence.tokens)

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """The reason why its newest token is its last; None if more follow."""
        request, tokens = sequence.job.request, sequence.tokens
        sampling, num_output = request.sampling, len(tokens) - request.num_prompt_tokens
        if tokens[-1] in self._stop_ids(sequence) and num_output >= sampling.min_tokens:
            return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.is_complete:
            return FinishReason.STOP
        if num_output >= sampling.max_tokens or len(tokens) >= self.max_model_tokens:
            return FinishReason.LENGTH
        return None

    def taken(self, sequence: Sequence, token_ids: SequenceOf[int]) -> tuple[int, FinishReason | None]:
        """How many of these tokens, one after another, a sequence without a grammar takes, and why the last ends it.

        As if each were appended and `finish_reason` asked, until there is one.
        """
        sampling, stop_ids, num_output = sequence.request.sampling, self._stop_ids(sequence), sequence.num_output
        first_stop = sampling.min_tokens - num_output
        most = min(sampling.max_tokens - num_output, self.max_model_tokens - len(sequence.tokens))
        for number, token_id in enumerate(token_ids, 1):
            if token_id in stop_ids and number >= first_stop:
                return number, FinishReason.STOP
            if number >= most:
                return number, FinishReason.LENGTH
        return len(token_ids), None

    def last_computed(self, sequence: Sequence) -> int:
        """The most tokens whose blocks it will ever need here: the last token sampled is never computed."""
        most = sequence.prompt_length + max(sequence.job.max_new - 1, 0)
        return min(most, self.max_model_tokens)

    def _stop_ids(self, sequence: Sequence) -> tuple[int, ...]:
        sampling = sequence.job.request.sampling
        if sampling.ignore_eos:
            return sampling.stop_token_ids
        own = sampling.stop_token_ids
        return (*self.eos_token_ids, *own) if own else self.eos_token_ids
