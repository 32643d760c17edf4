"""One checkpoint, one oracle and one model of each family for the whole session."""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.models.model import HybridModel
from headrace.models.weights import load_model
from tests.support.engine.interpreted import forget_all
from tests.support.engine.tiny_checkpoints import FAMILIES, VOCAB_SIZE, load_oracle, make_checkpoint

BLOCK_SIZE = 16
NUM_BLOCKS, NUM_SLOTS = 96, 24


@dataclass(frozen=True)
class Family:
    """A checkpoint as saved by transformers, its oracle, and Headrace's model loaded from the same files."""

    name: str
    path: Path
    oracle: PreTrainedModel
    model: HybridModel

    def runner(self) -> ModelRunner:
        """A runner whose memory is all NaN, so that a read before the first write shows."""
        runner = ModelRunner(self.model, CacheMemory(self.model.cache_layout(BLOCK_SIZE), NUM_BLOCKS, NUM_SLOTS))
        forget_all(runner)
        return runner

    @torch.inference_mode()
    def oracle_logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), V] of one full pass."""
        positions = torch.arange(len(tokens))[None]
        return self.oracle(torch.tensor([tokens]), position_ids=positions).logits[0]


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def load(name: str) -> Family:
        path = make_checkpoint(tmp_path_factory.mktemp(name), name, seed=1)
        return Family(name, path, load_oracle(path), load_model(path))

    return load


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, load_family) -> Family:
    return load_family(request.param)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


@pytest.fixture
def prompt():
    return random_tokens
