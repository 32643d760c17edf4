"""Runs engine steps of one model over one node's cache memory, and draws the next tokens on the model's device."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headrace.cache.tails import Tail
from headrace.engine.drafts.ahead import CheckedSequence, DraftsAhead
from headrace.engine.drafts.passes import CapturedDrafts, DraftStart, draft_tokens
from headrace.engine.graphs.captured_passes import (
    BATCH_SIZES,
    LONGEST_PASS_ROWS,
    MIXED_CHECK_ROWS,
    MOST_CHECKED_ROWS,
    MOST_MIXED_EACH,
    MOST_MIXED_ROWS,
    PREFILL_ROWS,
    Capture,
    CapturedPasses,
    CudaCapture,
    Inputs,
    StepGraphs,
    checked_sizes,
    mixed_counts,
    sizes_up_to,
)
from headrace.engine.graphs.decode_inputs import DecodeInputs, round_up
from headrace.engine.graphs.mixed_inputs import MixedInputs
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES, PrefillInputs
from headrace.engine.graphs.verify_inputs import VerifyInputs
from headrace.engine.sampling.draw import Draw, PromptRows
from headrace.engine.sampling.logprobs import PromptScores, rows_at_once
from headrace.engine.sampling.sampler import Drawn, choose, pending_bans
from headrace.engine.sampling.step_masks import WaitForMasks
from headrace.engine.sampling.token_biases import TokenBiases
from headrace.engine.sampling.token_counts import TokenCounts
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput, known_place
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tails import Tails
from headrace.kernels.lib.upload import upload_lists, upload_values
from headrace.kernels.sampling.argmax import argmax
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.models.logits import Logits
from headrace.models.model import HybridModel

MOST_REPLAYED_LOGITS = max(BATCH_SIZES[-1], MOST_CHECKED_ROWS) + MOST_SEQUENCES
"""Rows of logits of a captured pass at most: of a mixed one."""


@dataclass(frozen=True)
class Launched:
    """A launched step: on a GPU it may not have begun."""

    logits: Logits  # [rows, V] of all inputs' logit rows, or of the drawn ones alone if some are scored; the next
    # launch may overwrite them
    drawn: Drawn
    scores: list[PromptScores]  # one for each of the step's PromptRows


class ModelRunner:
    """Launches follow each other on one stream: each reads what the one before wrote, known to the host or not."""

    def __init__(self, model: HybridModel, memory: CacheMemory):
        layout = memory.layout
        difference = model.cache_layout(layout.block_size, layout.state_dtype).mismatch(layout)
        if difference is not None:
            raise ValueError(f"the cache memory was made for another model: {difference}")
        self.model = model
        self.memory = memory
        if model.has_tails and not memory.tails:
            memory.tails = model.new_tails(memory.num_tail_rows, memory.tail_places)
        # The last launch's tokens, in the order of its draws. Each sequence of a step has a slot of its own.
        most_draws = max(memory.num_slots, MOST_REPLAYED_LOGITS)
        self._drawn = torch.zeros(most_draws, dtype=torch.int64, device=memory.device)
        self.token_counts = TokenCounts(model.config.vocab_size, memory.device)
        self.token_biases = TokenBiases(model.config.vocab_size, memory.device)
        self._graphs = StepGraphs(layout.block_size)
        self._drafts: CapturedDrafts | None = None
        self._sources: CheckSources | None = None  # what captured checks and draft passes tell each other

    @torch.inference_mode()
    def capture_decodes(self, max_sequences: int, max_tokens: int, capture: Capture | None = None) -> None:
        """Captures decodes: from now on steps of single tokens are replays, padded to a few batch sizes.

        max_sequences   larger steps are not replayed; nor are those of sequences longer than `max_tokens`
        capture         None: on the current CUDA device
        """
        sizes = sizes_up_to(max_sequences, BATCH_SIZES)
        inputs = DecodeInputs(self.memory, self._drawn, sizes[-1], max_tokens)
        drawn = self._drawn.clone()  # capturing runs the work, on padding alone
        self._graphs.decodes = CapturedPasses(self._decode, inputs, sizes, capture or CudaCapture("decode", len(sizes)))
        self._drawn.copy_(drawn)

    @torch.inference_mode()
    def capture_prefills(self, max_rows: int, max_tokens: int, capture: Capture | None = None) -> None:
        """Captures prefills: from now on those of few sequences are replays, padded to a few sizes.

        max_rows   the most rows of a step; steps larger than the largest captured size are not replayed, nor are those
                   of sequences longer than `max_tokens`
        capture    None: on the current CUDA device
        """
        sizes = sizes_up_to(max_rows, (*PREFILL_ROWS, LONGEST_PASS_ROWS))
        inputs = PrefillInputs(self.memory, sizes[-1], max_tokens)
        capture = capture or CudaCapture("prefill", len(sizes))
        self._graphs.prefills = CapturedPasses(self._logit_rows, inputs, sizes, capture)

    @torch.inference_mode()
    def capture_mixes(self, capture: Capture | None = None) -> None:
        """Captures steps of decodes and short prefills in one pass, after both were captured on their own.

        capture    None: on the current CUDA device
        """
        decodes = self._graphs.decodes
        assert decodes is not None
        first = [(decodes.inputs, count) for count in mixed_counts(decodes.sizes[-1])]
        self._graphs.mixes = self._mixed("mixed", first, self._mixed_sizes, capture)

    @torch.inference_mode()
    def capture_mixed_checks(self, capture: Capture | None = None) -> None:
        """Captures checks and short prefills in one pass, after both were captured on their own.

        capture    None: on the current CUDA device
        """
        first = []
        for check in self._graphs.checks:
            assert isinstance(check.inputs, VerifyInputs)
            rows_each = check.inputs.rows_each
            if rows_each <= MOST_MIXED_EACH:
                first += [(check.inputs, rows_each * count) for count in mixed_counts(check.sizes[-1] // rows_each)]
        longest = self._mixed_sizes[-1]  # all steps of a node may be shorter than those of the list
        sizes = [size for size in self._mixed_sizes if size in (*MIXED_CHECK_ROWS, longest)]
        self._graphs.mixed_checks = self._mixed("mixed draft check", first, sizes, capture)

    def _mixed(
        self, what: str, first: Sequence[tuple[Inputs, int]], sizes: Sequence[int], capture: Capture | None
    ) -> tuple[CapturedPasses, ...]:
        """Passes of each of these inputs and numbers of rows, behind them prefills of each of these sizes."""
        prefills = self._graphs.prefills
        assert prefills is not None and isinstance(prefills.inputs, PrefillInputs)
        capture = capture or CudaCapture(what, len(first) * len(sizes))
        drawn, mixes = self._drawn.clone(), []
        for singles, num_rows in reversed(first):  # as in CapturedPasses
            inputs = MixedInputs(singles, prefills.inputs, num_rows)
            mixes.append(CapturedPasses(self._decode, inputs, [num_rows + size for size in sizes], capture))
        self._drawn.copy_(drawn)
        return tuple(reversed(mixes))

    @property
    def _mixed_sizes(self) -> list[int]:
        """Rows of the captured prefills that are short enough for mixed passes."""
        assert self._graphs.prefills is not None
        return [size for size in self._graphs.prefills.sizes if size <= MOST_MIXED_ROWS]

    @torch.inference_mode()
    def capture_checks(
        self, max_sequences: int, max_drafts: int, max_tokens: int, capture: Capture | None = None
    ) -> None:
        """Captures passes that check drafts, and those of the model's layer that makes them, if it was loaded.

        max_drafts   of a sequence in a step; `max_sequences` and `max_tokens` as in `capture_decodes`
        capture      None: on the current CUDA device
        """
        drawn, sizes_of = self._drawn.clone(), checked_sizes(max_sequences, max_drafts)
        most = round_up(sizes_up_to(max_sequences, BATCH_SIZES)[-1], 16)
        drafted = torch.zeros(most, max_drafts, dtype=torch.int64, device=self.memory.device)
        sources = CheckSources(self._drawn, drafted, torch.zeros_like(drafted[:, 0]))
        to_check = capture or CudaCapture("draft check", sum(map(len, sizes_of.values())))
        checks = []
        for rows_each, sizes in reversed(sizes_of.items()):
            inputs = VerifyInputs(self.memory, sources, sizes[-1] // rows_each, rows_each, max_tokens)
            checks.append(CapturedPasses(self._decode, inputs, sizes, to_check))
        self._graphs.checks = tuple(reversed(checks))
        self._drawn.copy_(drawn)
        if self.model.mtp is not None:
            sizes = sizes_up_to(max_sequences, BATCH_SIZES)
            to_draft = capture or CudaCapture("draft", (max_drafts + 2) * len(sizes))
            self._drafts = CapturedDrafts(self.model, self.memory, sources, sizes, max_tokens, to_draft)
            self._sources = sources

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Rows of the captured passes to which chunks of any number of rows are padded, ascending."""
        prefills = self._graphs.prefills
        return () if prefills is None else tuple(size for size in prefills.sizes if size <= PREFILL_ROWS[-1])

    def draft_tokens(self, starts: Sequence[DraftStart]) -> list[list[int]]:
        """The MTP layer's best tokens after each start. Waits for them."""
        if self._drafts is not None and self._drafts.fits(starts):
            return self._drafts.draft_tokens(starts)
        return draft_tokens(self.model, self.memory, starts)

    @torch.inference_mode()
    def change_draft_head(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Has rows of the head that drafts stand for these tokens, behind all that was launched. Waits for nothing."""
        assert self.model.draft_head is not None
        self.model.draft_head.replace(*upload_lists([rows, tokens], self.memory.device))

    @property
    def can_draft_ahead(self) -> bool:
        """True if the layer's passes were captured."""
        return self._drafts is not None

    def draft_ahead(self, starts: Sequence[CheckedSequence], num_passes: int) -> DraftsAhead | None:
        """The MTP layer's drafts behind the step just launched, as if its tokens were known. Waits for nothing.

        None where captured passes do not hold them. The next launch may take them as `future_drafts`.
        """
        if self._drafts is None or not self._drafts.takes(starts, num_passes):
            return None
        return self._drafts.draft_ahead(starts, num_passes)

    def _known(self, inputs: Sequence[SequenceInput]) -> Sequence[SequenceInput]:
        """The inputs with the values of their future drafts, in the places they have behind a check. Waits for both, if
        there are some."""
        if self._sources is None or all(entry.future_drafts is None and entry.behind is None for entry in inputs):
            return inputs
        drawn, made, num_accepted = (each.tolist() for each in self._sources)
        known = []
        for entry in inputs:
            first_draw = entry.future_token
            if entry.behind is not None:
                accepted = num_accepted[entry.behind.row]
                entry = known_place(entry, accepted, self.memory.tail_places // 2)
                first_draw = None if first_draw is None else first_draw + accepted
            if first_draw is not None or entry.future_drafts is not None:
                newest = entry.tokens[0] if first_draw is None else drawn[first_draw]
                drafts = entry.tokens[1:] if entry.future_drafts is None else made[entry.future_drafts]
                tokens = [newest, *drafts[: len(entry.tokens) - 1]]
                entry = replace(entry, tokens=tokens, future_token=None, future_drafts=None)
            known.append(entry)
        return known

    @cached_property
    def _replayed_logits(self) -> Tensor:
        """Logits of captured passes, `Logits.rows` [most rows, V]: the next replay may overwrite them, so one tensor
        serves all. One for each of a hundred passes was 6.8 GiB at V = 248,320 in float32."""
        shape = MOST_REPLAYED_LOGITS, self.model.config.vocab_size
        return torch.empty(shape, dtype=self.model.dtype, device=self.memory.device)

    def _logit_rows(self, batch: ForwardBatch) -> Tensor:
        """A forward pass to capture: `Logits.rows` in their shared place."""
        return self.model.forward(batch, self.memory, self._replayed_logits).rows

    def _decode(self, batch: ForwardBatch) -> Tensor:
        """A forward pass to capture, with greedy draws: the best token of row i is draw i."""
        logits = self._logit_rows(batch)
        argmax(logits, self._drawn[: len(logits)])
        return logits

    @torch.inference_mode()
    def forward(self, inputs: Sequence[SequenceInput]) -> Logits:
        """Logits [sum of num_logits, V], in the order of `inputs`; blocks and slots advance."""
        if not inputs:
            no_rows = torch.empty(0, self.model.config.vocab_size, dtype=self.model.dtype, device=self.model.device)
            return self._logits(no_rows)
        return self.model.logits(self._hidden(inputs))

    def _logits(self, rows: Tensor) -> Logits:
        return Logits(rows, self.model.config.logits_divisor)

    def _hidden(self, inputs: Sequence[SequenceInput]) -> Tensor:
        batch = ForwardBatch.build(
            self._known(inputs),
            self.memory.layout.block_size,
            self.model.device,
            self._drawn,
            tail_places=self.memory.tail_places,
            with_last_token_queries=self.model.uses_last_token_queries,
        )
        return self.model.hidden(batch, self.memory)

    @torch.inference_mode()
    def launch(
        self,
        inputs: Sequence[SequenceInput],
        draws: Sequence[tuple[int, Draw]],
        scored: Sequence[PromptRows] = (),
        wait_for_masks: WaitForMasks | None = None,
    ) -> Launched:
        """Runs a step, draws a token for each (logit row, draw), and scores rows. Waits for nothing on a GPU.

        Steps of the next launch may name these draws' indices as their `future_token`. `wait_for_masks` returns a mask
        for each draw with a `mask_row`; it is called when all but the draws is launched.
        """
        rows, wanted = [row for row, _ in draws], [draw for _, draw in draws]
        ids = self._drawn[: len(draws)]
        num_accepted = None if self._sources is None else self._sources.num_accepted
        each_once = {id(draw): draw for draw in wanted}  # those behind a sequence's drafts are often the same
        are_greedy = all(draw.is_greedy for draw in each_once.values())
        bans = None  # found before the step overwrites the tokens that they depend on
        if not are_greedy:
            bans = pending_bans(wanted, self._drawn, self.model.config.vocab_size)
        if scored:
            # Logits of all rows at once could take more memory than there is: a gigabyte for each thousand rows.
            hidden = self._hidden(inputs)
            scores = [self._score(hidden, prompt_rows) for prompt_rows in scored]
            logits = self.model.logits(hidden.index_select(0, upload_values(rows, hidden.device)))
            masks = self._masks(wait_for_masks)
            ids.copy_(choose(logits, wanted, self.token_counts, self.token_biases, bans, masks, num_accepted))
            return Launched(logits, Drawn(logits, ids, wanted), scores)
        replayed = self._graphs.run(inputs)
        logits = self.forward(inputs) if replayed is None else self._logits(replayed.logits)
        drawn_from = logits
        if rows != list(range(len(logits))):
            drawn_from = logits.select(upload_values(rows, self.model.device))
        are_drawn = replayed is not None and replayed.is_drawn and drawn_from is logits
        if draws and not (are_drawn and are_greedy):
            masks = self._masks(wait_for_masks)
            ids.copy_(choose(drawn_from, wanted, self.token_counts, self.token_biases, bans, masks, num_accepted))
        return Launched(logits, Drawn(drawn_from, ids, wanted), [])

    @torch.inference_mode()
    def write_states(self, states: Sequence[tuple[int, int, Tail, int]]) -> None:
        """Writes states of sequences behind all that was launched.

        states   of each the slot of the state before its tail, the slot to write, which may be the same, the tail, and
                 the number of tokens before the state that is written
        """
        places = self.memory.tail_places
        fields = [
            (src, dst, tail.row, tail.base % places, num_tokens - tail.base, num_tokens - tail.base)
            for src, dst, tail, num_tokens in states
        ]
        self.model.write_states(Tails(upload_values(fields, self.memory.device, torch.int32), rows_each=0), self.memory)

    def new_masks(self, num_draws: int) -> Tensor:
        """Room for masks [num_draws, ceil(V / 32)] int32; for a GPU where it copies from, kept until it has."""
        num_words = cdiv(self.model.config.vocab_size, 32)
        return torch.empty(num_draws, num_words, dtype=torch.int32, pin_memory=self.memory.device.type == "cuda")

    def _masks(self, wait_for_masks: WaitForMasks | None) -> Tensor | None:
        return None if wait_for_masks is None else wait_for_masks().to(self.memory.device, non_blocking=True)

    def keep_rows(self, owners: Collection[Hashable]) -> None:
        """Frees the counts and biases of all other sequences."""
        self.token_counts.keep_only(owners)
        self.token_biases.keep_only(owners)

    def free_memory(self) -> None:
        """Gives back to the device what torch keeps for later launches."""
        if self.memory.device.type == "cuda":
            torch.cuda.empty_cache()

    def _score(self, hidden: Tensor, rows: PromptRows) -> PromptScores:
        scores = PromptScores()
        step = rows_at_once(self.model.config.vocab_size, rows.num_top)
        for first in range(0, len(rows.targets) or 1, step):
            targets = rows.targets[first : first + step]
            first_row = rows.first_row + first
            logits = self.model.logits(hidden[first_row : first_row + len(targets)])
            scores.add(rows.start + first, logits.in_float32(), targets, rows.num_top)
        return scores
