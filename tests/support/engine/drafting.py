"""Drafts of a model's MTP layer, over memory of a test's own or an engine's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.logits import Logits
from headrace.models.model import HybridModel

BLOCK_SIZE = 16


class Newest(NamedTuple):
    """A sequence's token that no step has seen, behind the state in its slot."""

    token: int
    position: int
    blocks: Sequence[int]
    slot: int


@torch.inference_mode()
def drafts(model: HybridModel, memory: CacheMemory, *rows: Newest, num_drafts: int) -> Tensor:
    """Logits [sequences, num_drafts, V] after each sequence's newest token."""
    hidden = model.last_hidden(memory, torch.tensor([row.slot for row in rows]))
    tokens, logits = [row.token for row in rows], []
    for ahead in range(num_drafts):
        inputs = [
            SequenceInput([token], row.position + ahead, row.blocks, row.slot, row.slot)
            for token, row in zip(tokens, rows, strict=True)
        ]
        hidden = model.draft_hidden(ForwardBatch.build(inputs, BLOCK_SIZE, model.device), memory, hidden)
        assert model.draft_head is not None
        logits.append(Logits(model.draft_head(hidden), model.config.logits_divisor).in_float32())
        tokens = logits[-1].argmax(-1).tolist()
    return torch.stack(logits, dim=1)


@dataclass
class Drafting:
    """A model with its MTP layer over memory of its own, which is all NaN until it is written."""

    model: HybridModel
    memory: CacheMemory

    @classmethod
    def of(cls, model: HybridModel) -> "Drafting":
        memory = CacheMemory(model.cache_layout(BLOCK_SIZE), 32, 4)
        memory.tails = model.new_tails(memory.num_tail_rows, memory.tail_places)
        for pool in (*memory.pools, *(part for tail in memory.tails for part in tail.parts)):
            pool.fill_(float("nan"))
        return cls(model, memory)

    @torch.inference_mode()
    def step(self, *inputs: SequenceInput) -> Tensor:
        """Logits of the inputs' rows."""
        model = self.model
        batch = ForwardBatch.build(
            inputs,
            BLOCK_SIZE,
            model.device,
            tail_places=self.memory.tail_places,
            with_last_token_queries=model.uses_last_token_queries,
        )
        return model.forward(batch, self.memory).in_float32()

    def prefill(self, tokens: list[int], blocks: Sequence[int], slot: int, *cuts: int, start: int = 0) -> None:
        """Chunks from `start` on that end at `cuts` and at the end."""
        for begin, end in zip((start, *cuts), (*cuts, len(tokens)), strict=True):
            self.step(SequenceInput(tokens[begin:end], begin, blocks, slot if begin else None, slot))

    def drafts(self, *rows: Newest, num_drafts: int) -> Tensor:
        """Logits [sequences, num_drafts, V] after each sequence's newest token."""
        return drafts(self.model, self.memory, *rows, num_drafts=num_drafts)

    def entries(self, blocks: Sequence[int]) -> Tensor:
        """The MTP layer's keys and values in these blocks: [2, tokens, KV heads, head dim]."""
        return self.memory.attention[-1][list(blocks), 0].transpose(0, 1).flatten(1, 2)
