"""One engine step as values: its inputs, its draws, and what is kept of it until its tokens are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import repeat

from headrace.cache.publishing import ScheduledChunk
from headrace.engine.drafts.ahead import FutureDrafts
from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampling.draw import Draw, PromptRows
from headrace.engine.sampling.sampler import OnDevice
from headrace.engine.sampling.step_masks import WantedMask
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Sequence
from headrace.forward.sequence_input import SequenceInput
from headrace.speculation.draft_count import Offer
from headrace.step_costs import StepShape

FUTURE_TOKEN = 0  # stands in for a token whose value is still on the device


@dataclass(frozen=True)
class StepInputs:
    """The runner's orders for a step, and the sequences that its draws and scores belong to.

    draws         for each draw its logit row and its settings
    draw_index    the sequences that get a token, and its index among `draws`; those of drafts come behind it
    constrained   the masks of the draws with a `mask_row`, in that order
    scored        the chunks whose rows are scored, in the order of `rows`
    """

    inputs: list[SequenceInput] = field(default_factory=list)
    draws: list[tuple[int, Draw]] = field(default_factory=list)
    draw_index: dict[Sequence, int] = field(default_factory=dict)
    constrained: list[WantedMask] = field(default_factory=list)
    scored: list[ScheduledChunk[Sequence]] = field(default_factory=list)
    rows: list[PromptRows] = field(default_factory=list)


@dataclass(frozen=True)
class InFlight:
    """A launched step whose tokens the host does not know yet.

    offers       what the drafts of its sequences were chosen from
    shape        its contents, by which its time is judged
    began_s      when it was launched
    end          end of its work on the device: of the step itself, or of the layer's passes that draft behind it
    waits_for    end of the step before, with which this one begins; None: none was in flight at the launch
    turn_s       when the engine began to make the step, its drafts included; 0 in an engine that never drafts
    has_waited   with `overlap`: the device had nothing left to do when the step was launched
    is_probe     the step tries whether drafts pay by now
    """

    chunks: list[ScheduledChunk[Sequence]]
    inputs: StepInputs
    offers: Mapping[Sequence, Offer]
    launched: Launched
    shape: StepShape
    began_s: float
    end: OnDevice
    waits_for: OnDevice | None
    turn_s: float
    has_waited: bool
    is_probe: bool

    @property
    def has_drafts(self) -> bool:
        """True if the step checks drafts: how many of its tokens count is known only when it is over."""
        return bool(self.offers)


@dataclass(frozen=True)
class Shortage:
    """A step that could not be launched for want of memory."""

    cause: str


class StepBuilder:
    """Makes the inputs of steps. Rows of the device's counts and biases are made with the draws that need them."""

    def __init__(self, runner: ModelRunner, rules: StopRules) -> None:
        self._runner = runner
        self._rules = rules

    def build(self, chunks: list[ScheduledChunk[Sequence]], pending: Mapping[Sequence, int]) -> StepInputs:
        """The inputs of a step of these chunks. `pending`: the draws of the last launch that are not yet tokens."""
        step, num_rows = StepInputs(), 0
        for chunk in chunks:
            sequence, (start, end) = chunk.sequence, chunk.span
            if to_score := rows_to_score(chunk):
                step.scored.append(chunk)
                step.rows.append(_prompt_rows(sequence, to_score, num_rows + to_score.start - start))
            draws_token = end >= sequence.prefill_length and sequence.job.max_new > 0
            num_logits = end - start if to_score or chunk.num_drafts else int(draws_token)
            num_rows += num_logits
            future_token = pending.get(sequence)
            if draws_token:
                step.draw_index[sequence] = len(step.draws)
                first_row = num_rows - 1 - chunk.num_drafts
                draw = self._draw(sequence, future_token, step.constrained)
                step.draws.append((first_row, draw))
                if chunk.num_drafts:
                    draws = self._draws_after(chunk, draw, future_token, step.constrained)
                    step.draws.extend(enumerate(draws, first_row + 1))
            step.inputs.append(_sequence_input(chunk, num_logits, future_token))
        return step

    def _draw(self, sequence: Sequence, pending: int | None, masks: list[WantedMask]) -> Draw:
        """The draw of its next token; its mask, if it needs one, is appended."""
        if sequence.same_draw is not None:
            return sequence.same_draw
        request, counts_row, bias_row = sequence.request, None, None
        if request.sampling.has_penalty:
            # A new row cannot lack a pending token: a sequence keeps its row as long as it runs.
            counts_row = self._runner.token_counts.row(sequence, sequence.tokens, request.num_prompt_tokens)
        if request.sampling.has_bias:
            bias_row = self._runner.token_biases.row(sequence, request.sampling)
        draw = self._rules.draw(sequence, pending)
        if counts_row is None and bias_row is None and sequence.grammar is None:
            return draw
        mask_row = _mask_row(sequence, (), masks)
        return draw.with_rows(counts_row, bias_row, mask_row)

    def _draws_after(
        self, chunk: ScheduledChunk[Sequence], draw: Draw, pending: int | None, masks: list[WantedMask]
    ) -> Iterable[Draw]:
        """The draws of the tokens after one, two and more drafts; `draw` is the one before them."""
        if draw.is_greedy and chunk.sequence.bad_words is None:
            return repeat(draw, chunk.num_drafts)
        prefixes = (chunk.drafts[:number] for number in range(1, chunk.num_drafts + 1))
        return (self._draw_after(chunk.sequence, drafts, pending, masks) for drafts in prefixes)

    def _draw_after(
        self, sequence: Sequence, drafts: SequenceOf[int], pending: int | None, masks: list[WantedMask]
    ) -> Draw:
        """The draw of the token after these drafts, as `_draw` would make it if they were the sequence's tokens."""
        sampling, counts_row, bias_row = sequence.request.sampling, None, None
        if sampling.has_penalty:
            counts_row = self._runner.token_counts.row_after(sequence, drafts)
        if sampling.has_bias:
            bias_row = self._runner.token_biases.row(sequence, sampling)
        draw = self._rules.draw_after(sequence, drafts, pending)
        mask_row = _mask_row(sequence, drafts, masks)
        return draw.with_rows(counts_row, bias_row, mask_row)


def rows_to_score(chunk: ScheduledChunk[Sequence]) -> range:
    """Positions of the chunk's tokens with which the prompt's next ones are scored."""
    if chunk.sequence.job.prompt_logprobs is None:
        return range(0)
    to_score, span = chunk.sequence.to_score, chunk.span
    return range(max(to_score.start, span.start), min(to_score.stop, span.end))


def _mask_row(sequence: Sequence, drafts: SequenceOf[int], masks: list[WantedMask]) -> int | None:
    if sequence.grammar is None:
        return None
    masks.append((sequence, tuple(drafts)))
    return len(masks) - 1


def _sequence_input(chunk: ScheduledChunk[Sequence], num_logits: int, future_token: int | None) -> SequenceInput:
    sequence, (start, end), claim = chunk.sequence, chunk.span, chunk.sequence.held
    tokens: SequenceOf[int] = (FUTURE_TOKEN,)
    if future_token is None:
        tokens = sequence.tokens[start:end]
    future_drafts, drafts = None, chunk.drafts
    if chunk.num_drafts:
        if isinstance(drafts, FutureDrafts):
            future_drafts, drafts = drafts.row, [FUTURE_TOKEN] * chunk.num_drafts
        tokens = [*tokens, *drafts]
    emit: tuple[tuple[int, int], ...] = ()
    dst_slot = claim.slot
    if chunk.emit:
        emit = tuple((boundary.num_tokens, slot) for boundary, slot in chunk.emit)
    if chunk.draft_slots and chunk.tail is None:
        emit = tuple(enumerate(chunk.draft_slots, start + 1))
    elif chunk.draft_slots:
        [dst_slot] = chunk.draft_slots
    return SequenceInput(
        tokens=tokens,
        start=start,
        block_ids=claim.block_ids,
        src_slot=claim.state_slot if start else None,
        dst_slot=dst_slot,
        emit=emit,
        num_logits=num_logits,
        future_token=future_token,
        future_drafts=future_drafts,
        is_prompt=sequence.is_prefilling,
        tail=chunk.tail,
        behind=sequence.behind,
    )


def _prompt_rows(sequence: Sequence, to_score: range, first_row: int) -> PromptRows:
    num_top = sequence.job.prompt_logprobs
    assert num_top is not None, "nothing is to be scored without it"
    targets = sequence.tokens[to_score.start + 1 : min(to_score.stop + 1, sequence.request.num_prompt_tokens)]
    return PromptRows(first_row, to_score.start + 1, targets, num_top)
