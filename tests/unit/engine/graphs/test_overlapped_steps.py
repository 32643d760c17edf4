"""Captured steps, whose kernels overlap, equal the same steps with each kernel waiting for the one before it.

At real widths, a few layers of them: kernels of a step are then long and wide enough to meet their neighbours.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import Tail, tail_interval
from headrace.engine.graphs.captured_passes import CudaCapture
from headrace.engine.graphs.decode_inputs import DecodeInputs
from headrace.engine.graphs.prefill_inputs import PrefillInputs
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel
from headrace.models.weights import random_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

CONTEXT, BLOCK_SIZE, BLOCKS_EACH, NUM_STEPS, VOCAB = 510, 16, 40, 3, 50_000
INTERVAL = tail_interval(BLOCK_SIZE)
LAYERS = {"granite-h-micro": slice(3, 8), "qwen35-4b": slice(0, 5)}  # attention among states


def blocks_of(sequence: int) -> range:
    return range(BLOCKS_EACH * sequence, BLOCKS_EACH * (sequence + 1))


def steps_at(n: int, batch: int) -> list[SequenceInput]:
    """Sequences go on in the slots and rows of tails they have, in no order; the second one has just begun.

    Its first step writes its state, the base of its others; the second step writes theirs: their blocks end with it.
    """
    steps = []
    for i in range(batch):
        start, slot = n if i == 1 else CONTEXT + n, (7 * i + 3) % batch
        base = 1 if i == 1 else start - start % INTERVAL
        tail = Tail(slot, base).step(ChunkSpan(start, start + 1), INTERVAL) if start else Tail(slot, 0, 1)
        token = (1_009 * i + 31 * n) % VOCAB
        steps.append(SequenceInput((token,), start, blocks_of(i), slot if start else None, slot, tail=tail))
    return steps


def prefills_at(n: int, rows: int) -> list[SequenceInput]:
    """Two prompts go on, one in place; the second one has just begun. Two rows are left for padding."""
    of_each = [rows // 2 - n, rows // 4, rows // 4 - 2 + n]
    starts, slots = [CONTEXT, 0, CONTEXT + 3], [(0, 0), (None, 1), (2, 3 + n)]
    return [
        SequenceInput(range(7 * i + n, 7 * i + n + length), start, blocks_of(i), src, dst)
        for i, (length, start, (src, dst)) in enumerate(zip(of_each, starts, slots, strict=True))
    ]


class Node:
    """A model over caches that hold random numbers, and the inputs of captured steps of one number of rows."""

    def __init__(self, model: HybridModel, state_dtype: str, batch: int, num_rows: int):
        self.model, self.num_rows = model, num_rows
        self.memory = CacheMemory(model.cache_layout(BLOCK_SIZE, state_dtype), BLOCKS_EACH * batch, batch, "cuda")
        self.memory.tails = model.new_tails(self.memory.num_tail_rows, self.memory.tail_places)
        generator = torch.Generator("cuda").manual_seed(0)
        for pool in self.memory.pools:
            pool.normal_(generator=generator)
        for ring in self.rings():
            ring.zero_()
        self.inputs: DecodeInputs | PrefillInputs

    def forward(self) -> Tensor:
        return self.model.forward(self.inputs.batch(self.num_rows), self.memory).rows

    def rings(self) -> list[Tensor]:
        return [part for tail in self.memory.tails for part in tail.parts]

    def pools(self) -> list[Tensor]:
        return [*self.memory.pools, *self.rings()]

    def contents(self) -> list[Tensor]:
        return [pool.clone() for pool in self.pools()]

    def restore(self, contents: list[Tensor]) -> None:
        for pool, saved in zip(self.pools(), contents, strict=True):
            pool.copy_(saved)


def model_of(shape: str) -> HybridModel:
    layers = SHAPES[shape].layers[LAYERS[shape]]
    return random_model(replace(SHAPES[shape], layers=layers, vocab_size=VOCAB), torch.bfloat16, "cuda")


def assert_overlapped_equals_single_file(node: Node, passes: list[list[SequenceInput]], monkeypatch) -> None:
    before = node.contents()
    captured = CudaCapture("decode", 1)(node.forward)
    node.restore(before)
    replayed = []
    for steps in passes:
        node.inputs.load(steps, node.num_rows)
        captured.replay()
        replayed.append(captured.logits.clone())
    after = node.contents()

    node.restore(before)
    for name, module in list(sys.modules.items()):
        if name.startswith("headrace.kernels.") and hasattr(module, "OVERLAPPED"):
            monkeypatch.setattr(module, "OVERLAPPED", {})
    for n, (steps, logits) in enumerate(zip(passes, replayed, strict=True)):
        node.inputs.load(steps, node.num_rows)
        assert torch.equal(node.forward()[: len(steps)], logits[: len(steps)]), f"step {n}"
    for pool, expected in zip(after, node.contents(), strict=True):
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_overlapped_replays_equal_steps_in_single_file(shape: str, state_dtype: str, batch: int, monkeypatch) -> None:
    node = Node(model_of(shape), state_dtype, batch, num_rows=batch)
    drawn = torch.zeros(batch, dtype=torch.int64, device="cuda")
    node.inputs = DecodeInputs(node.memory, drawn, batch, BLOCKS_EACH * BLOCK_SIZE)
    node.inputs.load(steps_at(0, batch), batch)
    assert_overlapped_equals_single_file(node, [steps_at(n, batch) for n in range(NUM_STEPS)], monkeypatch)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_overlapped_prefills_equal_those_in_single_file(shape: str, rows: int, monkeypatch) -> None:
    node = Node(model_of(shape), "bfloat16", batch=8, num_rows=rows)
    node.inputs = PrefillInputs(node.memory, rows, BLOCKS_EACH * BLOCK_SIZE)
    assert_overlapped_equals_single_file(node, [prefills_at(n, rows) for n in range(NUM_STEPS)], monkeypatch)
