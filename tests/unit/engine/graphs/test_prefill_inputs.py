"""Short prefills through static inputs, in Triton's interpreter: padded passes equal plain ones.

Captures are faked, as in test_captured_passes.py; CUDA has its own test.
"""

import pytest
import torch
from torch import Tensor

from headrace.engine.graphs.captured_passes import CapturedPasses, StepGraphs
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES, MOST_WRITES, PrefillInputs
from headrace.engine.runner import ModelRunner
from headrace.forward.sequence_input import SequenceInput
from tests.support.engine.interpreted import BLOCKS_EACH, assert_same_memory, in_triton, step
from tests.support.engine.oracle import random_prompt

SIZE = 2 * MOST_SEQUENCES  # rows; which of several sizes a pass takes is test_captured_passes.py's business


class Node:
    """A model over memory of NaN, and its prefills as captured passes."""

    def __init__(self, runner: ModelRunner):
        self.runner, self.memory = runner, runner.memory
        self.memory.kv_pools[0][0][self.memory.scratch_block :] = float("nan")
        inputs = PrefillInputs(self.memory, SIZE, BLOCKS_EACH * 16)
        passes = CapturedPasses(runner._logit_rows, inputs, (SIZE,), in_triton)
        self.graphs = StepGraphs(self.memory.layout.block_size, prefills=passes)

    def replay(self, steps: list[SequenceInput]) -> Tensor:
        replayed = self.graphs.run(steps)
        assert replayed is not None, "these steps are to be replayed"
        return replayed.logits.clone()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda_prefills.py that does this")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "qwen35_moe"])
@torch.inference_mode()
def test_padded_passes_equal_plain_ones_token_for_token_and_state_for_state(name: str, load_family) -> None:
    """Fresh, resumed behind a prefix, in place and beside its source, with states left on the way; then a decode's."""
    a, b, c = random_prompt(29), random_prompt(11), random_prompt(5)
    passes = [
        [step(0, a, 0, 13, None, 0)],  # a fresh prompt, shorter than the size
        [step(0, a, 13, 29, 0, 5, emit=((16, 6), (17, 7), (28, 8)))],  # no padding; the source stays, states on the way
        [step(1, b, 0, 2, None, 1, num_logits=0)]  # as many as there may be
        + [step(i, c, 0, 2, None, 9 + i) for i in range(2, MOST_SEQUENCES + 1)],
        [step(1, b, 2, 11, 1, 1, emit=((8, 10),)), step(2, c, 2, 5, 11, 4)],  # in place, and beside its source
    ]
    plain, node = load_family(name).runner(), Node(load_family(name).runner())
    for steps in passes:
        expected, logits = plain.forward(steps).rows, node.replay(steps)
        assert logits.shape == expected.shape
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
        assert_same_memory(node.runner, plain)


def test_what_does_not_fit_is_left_to_the_plain_path(load_family) -> None:
    runner = load_family("granite").runner()
    inputs = PrefillInputs(runner.memory, 64, 100)
    prompt, blocks = random_prompt(200), list(range(20))

    def fits(*steps: SequenceInput) -> bool:
        return inputs.fits(steps)

    one = SequenceInput(prompt[:40], 0, blocks, None, 0)
    assert fits(one) and fits(*[one] * MOST_SEQUENCES)
    assert not fits(*[one] * (MOST_SEQUENCES + 1))
    assert not fits(SequenceInput(prompt[:1], 0, blocks, None, 0))
    assert not fits(SequenceInput(prompt[:40], 0, blocks, None, 0, num_logits=40))
    assert fits(SequenceInput(prompt[:10], 90, blocks, 0, 0)) and not fits(SequenceInput(prompt[:11], 90, blocks, 0, 0))
    emit = tuple((n, n) for n in range(1, MOST_WRITES + 1))
    assert fits(SequenceInput(prompt[:40], 0, blocks, None, 0, emit[1:]))
    assert not fits(SequenceInput(prompt[:40], 0, blocks, None, 0, emit))
