"""Checkpoints that several files of the engine's tests share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.drafters import ANSWER, KNOWN
from tests.support.engine.driving import generate, request, small_engine
from tests.support.engine.mtp_checkpoints import add_mtp, train_mtp

pytest.register_assert_rewrite("tests.support.engine.random_game")


@pytest.fixture(scope="session")
def trained(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layer knows the greedy answer to KNOWN, and guesses badly elsewhere."""
    path = Path(shutil.copytree(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("mtp") / "trained"))
    layer = add_mtp(path)
    answer = generate(small_engine(path), request(KNOWN, ANSWER)).tokens
    train_mtp(path, layer, [[*KNOWN, *answer]], num_steps=30)
    return path
