"""Stop conditions of a request, and the settings of its next token. Pure: no tensors, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.draw import Draw
from headrace.engine.sequence import Sequence
from headrace.request import FinishReason


@dataclass(frozen=True)
class StopRules:
    """The model's stop conditions: ids that end an answer, and the most tokens of prompt and answer together."""

    eos_token_ids: tuple[int, ...]
    max_model_tokens: int

    def draw(self, sequence: Sequence, num_pending: int, counts_row: int | None = None) -> Draw:
        """The draw of the next token, after `num_pending` tokens that are drawn but not yet among its tokens."""
        sampling = sequence.request.sampling
        too_early = sequence.num_output + num_pending < sampling.min_tokens
        banned = self._stop_ids(sequence) if too_early else ()
        return Draw(sampling, len(sequence.tokens) + num_pending, banned, counts_row)

    def wants_more(self, sequence: Sequence, num_pending: int) -> bool:
        """True if it takes another token after its pending ones, unless one of these is a stop token."""
        return (
            sequence.num_sampled + num_pending < sequence.job.max_new
            and sequence.num_output + num_pending < sequence.request.sampling.max_tokens
            and len(sequence.tokens) + num_pending < self.max_model_tokens
        )

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """The reason why its newest token is its last; None if more follow."""
        sampling = sequence.request.sampling
        if sequence.tokens[-1] in self._stop_ids(sequence) and sequence.num_output >= sampling.min_tokens:
            return FinishReason.STOP
        if sequence.num_output >= sampling.max_tokens or len(sequence.tokens) >= self.max_model_tokens:
            return FinishReason.LENGTH
        return None

    def last_computed(self, sequence: Sequence) -> int:
        """The most tokens whose blocks it will ever need here: the last token sampled is never computed."""
        most = sequence.prompt_length + max(sequence.job.max_new - 1, 0)
        return min(most, self.max_model_tokens)

    def _stop_ids(self, sequence: Sequence) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        return sampling.stop_token_ids if sampling.ignore_eos else (*self.eos_token_ids, *sampling.stop_token_ids)
