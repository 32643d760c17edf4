"""Captured passes of a model without layers, whose captures are reruns: which batches a step is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.graphs.captured_passes import Captured, CapturedPasses, StepGraphs
from headrace.engine.graphs.decode_inputs import DecodeInputs
from headrace.engine.graphs.prefill_inputs import PrefillInputs
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel

BLOCK_SIZE, VOCAB = 4, 50
LAYOUT = CacheLayout(
    "f", "float32", "float32", BLOCK_SIZE, (AttentionGroup(1, 1, 8),), (StateGroup(1, (5, 3), (2, 4, 4)),)
)


def rerun(work: Callable[[], Tensor]) -> Captured:
    """As a graph replays: the work again on what its inputs hold, its result in the same place."""
    logits = work().clone()
    return Captured(lambda: logits.copy_(work()), logits)


@dataclass
class Model:
    """Predicts token + 1, draws it as a captured decode does, and keeps what it was asked."""

    drawn: Tensor
    seen: list[ForwardBatch] = field(default_factory=list)

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.seen.append(batch)
        predicted = (batch.tokens_T + 1) % VOCAB
        if batch.logit_rows is not None:
            predicted = predicted[batch.logit_rows]
        if batch.num_decodes:
            self.drawn[: len(predicted)] = predicted
        return torch.nn.functional.one_hot(predicted, VOCAB).float()


@dataclass
class Setup:
    model: Model
    drawn: Tensor
    graphs: StepGraphs
    memory: CacheMemory

    @classmethod
    def of_decodes_and_prefills(cls) -> "Setup":
        """Passes of up to 8 decodes, and of up to 16 rows of prefills."""
        drawn = torch.zeros(64, dtype=torch.int64)
        model = Model(drawn)
        memory = CacheMemory(LAYOUT, num_blocks=6, num_slots=9)
        inputs = DecodeInputs(memory, drawn, max_rows=8, max_tokens=100)
        decodes = CapturedPasses(model.forward, inputs, (2, 4, 8), rerun)
        prefills = CapturedPasses(model.forward, PrefillInputs(memory, 16, 40), (8, 16), rerun)
        model.seen.clear()
        return cls(model, drawn, StepGraphs(BLOCK_SIZE, decodes, prefills), memory)


def logits_of(setup: Setup, inputs: list[SequenceInput]) -> Tensor:
    replayed = setup.graphs.run(inputs)
    assert replayed is not None
    return replayed.logits


def decode(token: int, start: int, blocks: list[int], src: int | None, dst: int, future_token: int | None = None):
    return SequenceInput((token,), start, blocks, src, dst, future_token=future_token)


def hidden_without_layers(model: HybridModel, batch: ForwardBatch, memory: CacheMemory) -> Tensor:
    """In place of `HybridModel.hidden`."""
    num_rows = len(batch.tokens_T) if batch.logit_rows is None else len(batch.logit_rows)
    return torch.zeros(num_rows, model.config.hidden_size)
