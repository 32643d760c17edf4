"""Checkpoints that every test of a session may share: random tiny models, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_checkpoints import make_checkpoint

torch.set_num_threads(1)  # several processes share the machine's two cores


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_checkpoint("granite")` is the folder of a random model of that family."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_checkpoint(path, family)

    return checkpoint
