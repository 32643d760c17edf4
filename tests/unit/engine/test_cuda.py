"""The same engine on a CUDA device: greedy tokens in float32 are those of the CPU. Runs where there is one."""

from dataclasses import replace

import pytest
import torch

from tests.support.driving import GREEDY, request, run_all, small_engine, submit
from tests.support.oracle import random_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

LENGTHS = (1, 16, 17, 64, 65, 300)


@pytest.mark.parametrize("family", ["granite", "granite_moe", "qwen35", "qwen35_moe"])
def test_greedy_tokens_on_cuda_equal_those_on_the_cpu(family, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)

    def answers(device: str) -> list[list[int]]:
        built = small_engine(path, device=device, dtype="float32")
        runs = [submit(built, request(random_prompt(n), replace(GREEDY, max_tokens=32))) for n in LENGTHS]
        run_all(built)
        return [run.tokens for run in runs]

    assert answers("cuda") == answers("cpu")
