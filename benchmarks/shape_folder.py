"""A model folder for a shape of `benchmarks.shapes`: what a router and nodes with `load_format: dummy` read.

The tokenizer is a small one, of the shipped models: it says the text of the first few thousand ids, and nothing of the
others. Prompts are token ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from headrace.models.config import AttentionConfig, GatedDeltaConfig, Mamba2Config, ModelConfig

TOKENIZER = Path(__file__).parents[1] / "tiny_models" / "headrace-tiny-qwen3.5"


def write_shape(config: ModelConfig, folder: Path) -> Path:
    """Fills `folder`, which is made, without weights; `headrace.models.weights.load_config` gives `config` back."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, folder)
    of_family = _delta_fields if isinstance(config.state, GatedDeltaConfig) else _mamba_fields
    fields = {**_common_fields(config), **of_family(config)}
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return folder


def write_weights(folder: Path, device: str) -> None:
    """Random bfloat16 weights for the shape in `folder`, as transformers initialises and saves them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)  # transformers writes its own fields
    (folder / "generation_config.json").unlink(missing_ok=True)


def _common_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "hidden_size": config.hidden_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "hidden_act": "silu",
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _mamba_fields(config: ModelConfig) -> dict[str, Any]:
    attention, state = config.attention, config.state
    assert isinstance(state, Mamba2Config) and attention.head_dim * attention.num_heads == config.hidden_size
    return {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if each.mixer == "attention" else "mamba" for each in config.layers],
        "intermediate_size": config.intermediate_size,
        "shared_intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "attention_multiplier": attention.scale,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
        "mamba_n_heads": state.num_heads,
        "mamba_d_head": state.head_dim,
        "mamba_expand": state.inner_size // config.hidden_size,
        "mamba_d_state": state.state_size,
        "mamba_n_groups": state.num_groups,
        "mamba_d_conv": state.conv_taps,
        "mamba_conv_bias": state.has_conv_bias,
    }


def _delta_fields(config: ModelConfig) -> dict[str, Any]:
    attention, state = config.attention, config.state
    assert isinstance(state, GatedDeltaConfig)
    return {
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention" if e.mixer == "attention" else "linear_attention" for e in config.layers],
        "intermediate_size": config.intermediate_size,
        "head_dim": attention.head_dim,
        "rope_parameters": _rotation(attention),
        "linear_num_key_heads": state.num_key_heads,
        "linear_num_value_heads": state.num_value_heads,
        "linear_key_head_dim": state.key_dim,
        "linear_value_head_dim": state.value_dim,
        "linear_conv_kernel_dim": state.conv_taps,
    }


def _rotation(attention: AttentionConfig) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": attention.rope_theta,
        "partial_rotary_factor": attention.rotary_dim / attention.head_dim,
    }
