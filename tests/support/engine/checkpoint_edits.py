"""Changes to a checkpoint's folder, and a model's logits, for tests of loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel


def edit_config(path: Path, **fields: object) -> dict[str, Any]:
    """Sets fields of config.json; returns all of them."""
    config = {**json.loads((path / "config.json").read_text()), **fields}
    (path / "config.json").write_text(json.dumps(config))
    return config


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replaces the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    save_file(edit(tensors), path / "model.safetensors", metadata={"format": "pt"})


def logits_of(model: HybridModel, tokens: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt, computed at once."""
    num_blocks = -(-len(tokens) // 16)
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), num_blocks, 1))
    return runner.forward([SequenceInput(tokens, 0, range(num_blocks), None, 0, num_logits=len(tokens))]).in_float32()
