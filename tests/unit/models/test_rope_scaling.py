"""Stretched rotary frequencies against transformers'."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.rotary import inverse_frequencies
from headrace.models.config import ModelConfig, ModelError
from headrace.models.weights import load_config, load_model
from tests.support.engine.tiny_checkpoints import build_model, qwen_fields

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
KINDS: list[dict[str, Any]] = [
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    YARN | {"original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
]


def written(folder: Path, rope: dict[str, Any] | None, **fields: Any) -> Path:
    config = Qwen3NextConfig(**qwen_fields() | {"head_dim": 64}, mlp_only_layers=[0, 1, 2, 3], intermediate_size=96)
    values = config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"], "rope_parameters": rope} | fields
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    attention = config.attention
    assert attention.rope_scaling is not None
    plain = inverse_frequencies(attention.rotary_dim, attention.rope_theta, torch.device("cpu"))
    return attention.rope_scaling.stretch(plain, attention.rope_theta), attention.rope_scaling.attention_factor


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factors_are_those_of_transformers(kind: dict[str, Any], share: float, tmp_path: Path):
    rope = kind | {"rope_theta": 1e6, "partial_rotary_factor": share}
    ours, factor = frequencies(load_config(written(tmp_path, rope)))
    config = Qwen3NextConfig(**qwen_fields() | {"head_dim": 64}, rope_parameters=rope)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2e-6)
    assert factor == pytest.approx(their_factor)


@pytest.mark.parametrize("kind", [YARN | {"original_max_position_embeddings": 256}, LLAMA3])
def test_logits_are_those_of_transformers(kind: dict[str, Any], tmp_path: Path, prompt):
    rope = kind | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    theirs = build_model(Qwen3_5TextConfig(**qwen_fields(), intermediate_size=96, rope_parameters=rope))
    theirs.save_pretrained(tmp_path)
    tokens = prompt(400)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), position_ids=torch.arange(400)[None]).logits[0]
    model = load_model(tmp_path)
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), 25, 1))
    logits = runner.forward([SequenceInput(tokens, 0, range(25), None, 0, num_logits=400)]).in_float32()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_yarn_multiplies_the_trained_context(tmp_path: Path):
    assert load_config(written(tmp_path, YARN)).max_position == 16384
    without_factor = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    config = load_config(written(tmp_path, without_factor))
    assert config.max_position == 4096 and config.attention.rope_scaling is not None
    assert config.attention.rope_scaling.factor == 4.0


def test_older_files_name_the_scaling_apart(tmp_path: Path):
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    new = load_config(written(tmp_path, YARN | {"rope_theta": 1e6, "partial_rotary_factor": 0.25}))
    outside = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert load_config(written(tmp_path, None, rope_scaling=old, **outside)) == new
    both = {"rope_type": "default", "rope_theta": 7.0}  # transformers takes the older name's, too
    assert load_config(written(tmp_path, both, rope_scaling=old, **outside)) == new


def test_the_trained_context_may_stand_beside_the_rotary_parameters(tmp_path: Path):
    inside = load_config(written(tmp_path, YARN | {"rope_theta": 1e6}))
    without = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    beside = written(tmp_path, without, original_max_position_embeddings=4096, max_position_embeddings=16384)
    assert load_config(beside) == replace(inside, max_position=16384)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic': only default, linear, llama3, mrope, yarn"),
        ({"rope_type": "linear"}, "rope_parameters.factor None: must be a finite number above 0"),
        (YARN | {"factor": "4"}, "rope_parameters.factor '4': must be a finite number above 0"),
        (YARN | {"truncate": 1}, "truncate 1: must be true or false"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4.0: must be below high_freq_factor 4.0"),
    ],
)
def test_what_is_wrong_is_named(rope: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ModelError) as refusal:
        load_config(written(tmp_path, rope))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
