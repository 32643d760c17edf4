"""Captured decode steps, whose kernels overlap, equal the same steps with each kernel waiting for the one before it.

At real widths, a few layers of them: kernels of a step are then long and wide enough to meet their neighbours.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.shapes import SHAPES
from engine.batch import SequenceStep
from engine.decode_inputs import DecodeInputs
from engine.graphs import CudaCapture
from engine.memory import CacheMemory
from engine.model import HybridModel
from engine.weights import dummy_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

CONTEXT, BLOCK_SIZE, BLOCKS_EACH, NUM_STEPS, VOCAB = 500, 16, 40, 3, 50_000
LAYERS = {"granite-h-micro": slice(3, 8), "qwen35-4b": slice(0, 5)}  # attention among states


def blocks_of(sequence: int) -> range:
    return range(BLOCKS_EACH * sequence, BLOCKS_EACH * (sequence + 1))


def steps_at(n: int, batch: int) -> list[SequenceStep]:
    """Sequences go on in the slots they have, in no order; the second one has just begun."""
    steps = []
    for i in range(batch):
        start, slot = n if i == 1 else CONTEXT + n, (7 * i + 3) % batch
        token = (1_009 * i + 31 * n) % VOCAB
        steps.append(SequenceStep((token,), start, blocks_of(i), slot if start else None, slot))
    return steps


class Node:
    """A model over caches that hold random numbers."""

    def __init__(self, model: HybridModel, state_dtype: str, batch: int):
        self.model, self.batch = model, batch
        self.memory = CacheMemory(model.cache_layout(BLOCK_SIZE, state_dtype), BLOCKS_EACH * batch, batch, "cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        for pool in (self.memory.kv, self.memory.conv, self.memory.rec):
            pool.normal_(generator=generator)
        drawn = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.inputs = DecodeInputs(self.memory, drawn, batch, BLOCKS_EACH * BLOCK_SIZE)
        self.inputs.load(steps_at(0, batch), batch)

    def forward(self) -> Tensor:
        return self.model.forward(self.inputs.plan(self.batch), self.memory)

    def contents(self) -> list[Tensor]:
        return [self.memory.kv.clone(), self.memory.conv.clone(), self.memory.rec.clone()]

    def restore(self, contents: list[Tensor]) -> None:
        for pool, saved in zip((self.memory.kv, self.memory.conv, self.memory.rec), contents, strict=True):
            pool.copy_(saved)


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_overlapped_replays_equal_steps_in_single_file(shape: str, state_dtype: str, batch: int, monkeypatch) -> None:
    layers = SHAPES[shape].layers[LAYERS[shape]]
    model = dummy_model(replace(SHAPES[shape], layers=layers, vocab_size=VOCAB), torch.bfloat16, "cuda")
    node = Node(model, state_dtype, batch)
    before = node.contents()

    captured = CudaCapture()(node.forward)
    node.restore(before)
    replayed = []
    for n in range(NUM_STEPS):
        node.inputs.load(steps_at(n, batch), batch)
        captured.replay()
        replayed.append(captured.logits.clone())
    after = node.contents()

    node.restore(before)
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and hasattr(module, "OVERLAPPED"):
            monkeypatch.setattr(module, "OVERLAPPED", {})
    for n in range(NUM_STEPS):
        node.inputs.load(steps_at(n, batch), batch)
        assert torch.equal(node.forward(), replayed[n]), f"step {n}"
    for pool, expected in zip(after, node.contents(), strict=True):
        assert torch.equal(pool, expected)
