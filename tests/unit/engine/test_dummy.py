"""Models without files, and the engine's settings for them and for states of another width."""

import json
from pathlib import Path

import pytest
import torch

from headrace.config import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_step import SequenceStep
from headrace.models.weights import load_config, load_model, random_model
from tests.support.engine.driving import generate, request, small_engine
from tests.support.engine.oracle import random_prompt

FAMILIES = ("granite", "granite_moe", "qwen35", "qwen35_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_give_ordinary_logits(family: str, tiny_checkpoint) -> None:
    model = random_model(load_config(tiny_checkpoint(family)))
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), 20, 1))
    tokens = random_prompt(300)
    logits = runner.forward([SequenceStep(tokens, 0, range(20), None, 0, num_logits=len(tokens))])
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len(logits.argmax(-1).unique()) > 30  # the answer depends on the prompt


def test_the_same_shape_is_the_same_model_and_no_other_one(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    config = load_config(path)
    first, second = random_model(config), random_model(config)
    assert torch.equal(first.embedding, second.embedding)
    assert first.fingerprint == second.fingerprint != load_model(path).fingerprint
    assert first.fingerprint != random_model(load_config(tiny_checkpoint("granite_moe"))).fingerprint


def test_the_engine_serves_a_folder_that_has_a_config_only(tiny_checkpoint, tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("qwen35") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = small_engine(tmp_path, load_format="dummy")
    assert len(generate(built, request(random_prompt(50))).tokens) == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_dtype": "bfloat16"}, "state_dtype bfloat16 on cpu: use float32"),
        ({"state_dtype": "int8", "device": "cuda"}, "state_dtype 'int8': must be one of float32, bfloat16"),
        ({"load_format": "pickle"}, "load_format 'pickle': must be one of safetensors, dummy"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


def test_states_of_half_the_width_take_half_the_bytes(tiny_checkpoint) -> None:
    model = random_model(load_config(tiny_checkpoint("granite")))
    asked = EngineConfig(device="cuda:1", state_dtype="bfloat16")
    wide, narrow = model.cache_layout(16), model.cache_layout(16, asked.state_dtype)
    assert narrow.rec_bytes * 2 == wide.rec_bytes and narrow.conv_bytes == wide.conv_bytes
    assert ModelRunner(model, CacheMemory(narrow, 1, 1)).memory.rec.dtype == torch.bfloat16
    assert wide.mismatch(narrow) == "state_dtype float32 != bfloat16"
