"""Runs engine steps of one model over one node's cache memory, and draws the next tokens where the logits are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.engine.decode_inputs import DecodeInputs
from headrace.engine.graphs import (
    BATCH_SIZES,
    PREFILL_ROWS,
    Capture,
    CapturedPasses,
    CudaCapture,
    StepGraphs,
    sizes_up_to,
)
from headrace.engine.prefill_inputs import PrefillInputs
from headrace.engine.sampler import Draw, Drawn, choose
from headrace.forward.forward_batch import StepPlan
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_step import SequenceStep
from headrace.kernels.lib.upload import upload_values
from headrace.kernels.sampling.argmax import argmax
from headrace.models.model import HybridModel


@dataclass(frozen=True)
class Launched:
    """A step that was launched: on a GPU it may not have begun."""

    logits: Tensor  # float32 [sum of num_logits, V] in the order of the steps; the next launch may overwrite them
    drawn: Drawn


class ModelRunner:
    """Launches follow each other on one stream: what one writes, the next one reads, whatever the host knows."""

    def __init__(self, model: HybridModel, memory: CacheMemory):
        layout = memory.layout
        difference = model.cache_layout(layout.block_size, layout.state_dtype).mismatch(layout)
        if difference is not None:
            raise ValueError(f"the cache memory was made for another model: {difference}")
        self.model = model
        self.memory = memory
        # What the last launch drew, in the order of its draws. Each sequence of a step has a slot of its own.
        most_draws = max(memory.num_slots, BATCH_SIZES[-1])
        self._drawn = torch.zeros(most_draws, dtype=torch.int64, device=memory.device)
        self._graphs = StepGraphs(layout.block_size)

    @torch.inference_mode()
    def capture_decodes(self, max_sequences: int, max_tokens: int, capture: Capture | None = None) -> None:
        """From now on steps of single tokens are replays, padded to a few batch sizes.

        max_sequences   larger steps run as before; so do those of sequences longer than `max_tokens`
        capture         None: on the current CUDA device
        """
        sizes = sizes_up_to(max_sequences, BATCH_SIZES)
        inputs = DecodeInputs(self.memory, self._drawn, sizes[-1], max_tokens)
        drawn = self._drawn.clone()  # capturing runs the work, on padding alone
        self._graphs.decodes = CapturedPasses(self._decode, inputs, sizes, capture or CudaCapture("decode", len(sizes)))
        self._drawn.copy_(drawn)

    @torch.inference_mode()
    def capture_prefills(self, max_rows: int, max_tokens: int, capture: Capture | None = None) -> None:
        """From now on prefills of a few sequences and few rows are replays, padded to a few numbers of rows.

        max_rows   as many as a step ever has; more than the largest captured number run as before, and so do those of
                   sequences longer than `max_tokens`
        capture    None: on the current CUDA device
        """
        sizes = sizes_up_to(max_rows, PREFILL_ROWS)
        inputs = PrefillInputs(self.memory, sizes[-1], max_tokens)
        forward = partial(self.model.forward, memory=self.memory)
        self._graphs.prefills = CapturedPasses(forward, inputs, sizes, capture or CudaCapture("prefill", len(sizes)))

    def _decode(self, plan: StepPlan) -> Tensor:
        """A forward pass with greedy draws: the best token of row i goes to place i."""
        logits = self.model.forward(plan, self.memory)
        argmax(logits, self._drawn[: len(logits)])
        return logits

    @torch.inference_mode()
    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Float32 logits [sum of num_logits, V], in the order of `steps`; blocks and slots advance."""
        if not steps:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        plan = StepPlan.build(
            steps,
            self.memory.layout.block_size,
            self.model.device,
            self._drawn,
            with_tails=self.model.reads_tails,
        )
        return self.model.forward(plan, self.memory)

    @torch.inference_mode()
    def launch(self, steps: Sequence[SequenceStep], draws: Sequence[tuple[int, Draw]]) -> Launched:
        """Runs a step and draws a token for each (row of its logits, draw). On a GPU nothing is waited for.

        A step of the next launch may be fed from a place among these draws.
        """
        rows, asked = [row for row, _ in draws], [draw for _, draw in draws]
        ids = self._drawn[: len(draws)]
        replayed = self._graphs.run(steps)
        logits = self.forward(steps) if replayed is None else replayed
        drawn_from = logits
        if rows != list(range(len(logits))):
            drawn_from = logits.index_select(0, upload_values(rows, logits.device))
        # Replayed decodes have drawn each row's best token themselves.
        are_drawn = replayed is not None and drawn_from is logits and all(len(step.tokens) == 1 for step in steps)
        if draws and not (are_drawn and all(draw.is_greedy for draw in asked)):
            ids.copy_(choose(drawn_from, asked))
        return Launched(logits, Drawn(drawn_from, ids, asked))
