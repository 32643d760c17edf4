"""Models without weight files."""

import json
from pathlib import Path

import pytest
import torch

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.branches import FeedForwardBranch
from headrace.models.layers.feed_forward import MixtureOfExperts
from headrace.models.weights import load_config, load_model, random_model
from tests.support.engine.driving import generate, request, small_engine
from tests.support.engine.oracle import random_prompt

FAMILIES = (
    "falcon_h1", "granite", "granite_moe", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "nemotron_h_moe", "olmo_hybrid", "qwen35", "qwen35_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_give_ordinary_logits(family: str, tiny_checkpoint) -> None:
    model = random_model(load_config(tiny_checkpoint(family)))
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), 20, 1))
    tokens = random_prompt(300)
    logits = runner.forward([SequenceInput(tokens, 0, range(20), None, 0, num_logits=len(tokens))]).in_float32()
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len(logits.argmax(-1).unique()) > 30  # the answer depends on the prompt


@pytest.mark.parametrize("family", ["kimi_linear", "lfm2_moe", "nemotron_h_moe"])
def test_random_routers_prefer_no_expert(family: str, tiny_checkpoint) -> None:
    model = random_model(load_config(tiny_checkpoint(family)))
    mixtures = [each.feed_forward for each in model.chain.branches if isinstance(each, FeedForwardBranch)]
    routers = [mixture.router for mixture in mixtures if isinstance(mixture, MixtureOfExperts)]
    assert routers and not any(router.bias.any() for router in routers)


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
