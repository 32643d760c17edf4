"""What follows from a request's sampling fields for its next token, and when its answer ends: pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.sampler import Draw
from headrace.engine.sequence import Sequence
from headrace.request import FinishReason


@dataclass(frozen=True)
class AnswerRules:
    """The model's part in them: ids that end an answer, and tokens that it can hold, prompt included."""

    eos_token_ids: tuple[int, ...]
    max_model_tokens: int

    def draw(self, sequence: Sequence, num_pending: int) -> Draw:
        """How the next token is sampled, behind `num_pending` that have been and are not in its tokens yet."""
        sampling = sequence.request.sampling
        too_early = sequence.num_output + num_pending < sampling.min_tokens
        banned = self._stop_ids(sequence) if too_early else ()
        return Draw(sampling, sequence.tokens, sequence.request.num_prompt_tokens, banned, num_pending)

    def wants_more(self, sequence: Sequence, num_pending: int) -> bool:
        """Whether it goes on after its pending tokens, whatever they turn out to be: unless one of them stops it."""
        return (
            sequence.num_sampled + num_pending < sequence.job.max_new
            and sequence.num_output + num_pending < sequence.request.sampling.max_tokens
            and len(sequence.tokens) + num_pending < self.max_model_tokens
        )

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Why its newest token is its last; None if it goes on."""
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
