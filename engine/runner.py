"""Runs engine steps of one model over one node's cache memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import SequenceStep
from engine.memory import CacheMemory
from engine.model import HybridModel
from engine.step_plan import StepPlan


class ModelRunner:
    def __init__(self, model: HybridModel, memory: CacheMemory):
        layout = memory.layout
        difference = model.cache_layout(layout.block_size, layout.state_dtype).mismatch(layout)
        if difference is not None:
            raise ValueError(f"the cache memory was made for another model: {difference}")
        self.model = model
        self.memory = memory

    @torch.inference_mode()
    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Float32 logits [sum of num_logits, V], in the order of `steps`; blocks and slots advance."""
        if not steps:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        plan = StepPlan.build(steps, self.memory.layout.block_size, self.model.device)
        return self.model.forward(plan, self.memory)
