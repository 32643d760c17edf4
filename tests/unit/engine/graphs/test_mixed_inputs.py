"""Decodes and a chunk in one pass, in Triton's interpreter: equal to plain steps. CUDA has its own test."""

from functools import partial

import pytest
import torch

from headrace.engine.graphs.captured_passes import CapturedPasses, StepGraphs
from headrace.engine.graphs.decode_inputs import DecodeInputs
from headrace.engine.graphs.mixed_inputs import MixedInputs
from headrace.engine.graphs.prefill_inputs import PrefillInputs
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.argmax import argmax_torch
from tests.support.engine.interpreted import BLOCKS_EACH, assert_same_memory, blocks_of, in_triton, step
from tests.support.engine.oracle import random_prompt

DECODES, CHUNK = 4, 12  # rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda_prefills.py that does this")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "qwen35_moe"])
@torch.inference_mode()
def test_mixed_passes_equal_plain_steps_token_for_token_and_state_for_state(name: str, load_family) -> None:
    """Decodes of drawn and of known tokens, a chunk of one token without logits, two chunks, a state on the way."""
    plain, mixing = load_family(name).runner(), load_family(name).runner()
    memory, drawn = mixing.memory, torch.zeros(64, dtype=torch.int64)
    memory.kv_pools[0][0][memory.scratch_block :] = float("nan")

    def forward(batch) -> torch.Tensor:
        logits = mixing.model.forward(batch, memory).rows
        argmax_torch(logits, drawn[: len(logits)])
        return logits

    decodes = DecodeInputs(memory, drawn, DECODES, BLOCKS_EACH * 16)
    prefills = PrefillInputs(memory, CHUNK, BLOCKS_EACH * 16)
    mixed = CapturedPasses(forward, MixedInputs(decodes, prefills, DECODES), (DECODES + CHUNK,), in_triton)
    capture_nothing = partial(CapturedPasses, forward, sizes=(CHUNK,), capture=in_triton)
    graphs = StepGraphs(memory.layout.block_size, None, capture_nothing(inputs=prefills), (mixed,))
    a, b, c, d = (random_prompt(n, seed=n) for n in (17, 30, 9, 12))
    first = [step(0, a, 0, 17, None, 0), step(3, d, 0, 12, None, 3)]
    said = plain.forward(first).rows.argmax(-1).tolist()
    assert mixing.forward(first).rows.argmax(-1).tolist() == said

    def decode(sequence: int, start: int, token: int, future_token: int | None = None) -> SequenceInput:
        return SequenceInput((token,), start, blocks_of(sequence), sequence, sequence, future_token=future_token)

    chunks = [
        [step(1, b, 0, 10, None, 1, num_logits=0)],
        [step(2, c, 0, 1, None, 2, num_logits=0), step(1, b, 10, 22, 1, 5, emit=((16, 6),), num_logits=0)],
        [step(2, c, 1, 9, 2, 2), step(1, b, 22, 26, 5, 1, num_logits=0)],
    ]
    for n, some in enumerate(chunks):
        steps = [decode(0, 17 + n, said[0]), decode(3, 12 + n, said[1])]
        expected = plain.forward([*steps, *some]).rows
        if n:  # the tokens that the pass before has drawn
            steps = [decode(0, 17 + n, 0, future_token=0), decode(3, 12 + n, 0, future_token=1)]
        replayed = graphs.run([*steps, *some])
        assert replayed is not None and replayed.is_drawn
        said = expected.argmax(-1).tolist()
        assert replayed.logits.argmax(-1).tolist() == said == drawn[: len(said)].tolist()
        torch.testing.assert_close(replayed.logits, expected, atol=2e-3, rtol=1e-3)
        assert_same_memory(mixing, plain)
