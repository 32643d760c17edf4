"""Model shapes of real sizes, small ones for CPUs, and model folders for dense ones, with or without weights.

A folder without weights is loaded by `load_format: dummy`. Its tokenizer is that of a shipped model: it decodes the
first few thousand ids and no others. Prompts are token ids.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    MoeConfig,
)
from headrace.models.families.nemotron_h import LAYERS as NEMOTRON_LAYERS

TINY_MODELS = Path(__file__).parents[1] / "tiny_models"
_ATTENTION, _STATE = LayerConfig("attention", "dense"), LayerConfig("state", "dense")
_MOE_ATTENTION, _MOE_STATE = LayerConfig("attention", "moe"), LayerConfig("state", "moe")


def _qwen_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionConfig:
    return AttentionConfig(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rotary_dim=head_dim // 4,
        rope_theta=1e7,
        has_qk_norm=True,
        has_output_gate=True,
    )


GRANITE_H_MICRO = ModelConfig(
    architecture="GraniteMoeHybridForCausalLM",
    vocab_size=100352,
    max_position=131072,
    hidden_size=2048,
    intermediate_size=8192,
    norm_eps=1e-5,
    tied_embeddings=True,
    layers=tuple(_ATTENTION if layer in (5, 15, 25, 35) else _STATE for layer in range(40)),
    attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.015625),
    state=Mamba2Config(num_heads=64, head_dim=64, state_size=128, num_groups=1, conv_taps=4, has_conv_bias=True),
    moe=None,
    embedding_multiplier=12,
    residual_multiplier=0.22,
    logits_divisor=8,
)

QWEN35_4B = ModelConfig(
    architecture="Qwen3_5ForConditionalGeneration",
    vocab_size=248320,
    max_position=262144,
    hidden_size=2560,
    intermediate_size=9216,
    norm_eps=1e-6,
    tied_embeddings=True,
    layers=(_STATE, _STATE, _STATE, _ATTENTION) * 8,
    attention=_qwen_attention(num_heads=16, num_kv_heads=4, head_dim=256),
    state=GatedDeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_taps=4),
    moe=None,
)

SHAPES = {"qwen35-4b": QWEN35_4B, "granite-h-micro": GRANITE_H_MICRO}

GRANITE_H_TINY = replace(
    GRANITE_H_MICRO,
    hidden_size=1536,
    intermediate_size=1024,
    layers=tuple(_MOE_ATTENTION if layer in (5, 15, 25, 35) else _MOE_STATE for layer in range(40)),
    attention=AttentionConfig(num_heads=12, num_kv_heads=4, head_dim=128, scale=0.0078125),
    state=Mamba2Config(num_heads=48, head_dim=64, state_size=128, num_groups=1, conv_taps=4, has_conv_bias=True),
    moe=MoeConfig(
        num_experts=64,
        experts_per_token=6,
        intermediate_size=512,
        shared_intermediate_size=1024,
        router="top_k_then_softmax",
        renormalize=False,
        has_shared_gate=False,
    ),
    logits_divisor=6,
)

QWEN35_35B_A3B = replace(
    QWEN35_4B,
    architecture="Qwen3_5MoeForConditionalGeneration",
    hidden_size=2048,
    intermediate_size=0,
    tied_embeddings=False,
    layers=(_MOE_STATE, _MOE_STATE, _MOE_STATE, _MOE_ATTENTION) * 10,
    attention=_qwen_attention(num_heads=16, num_kv_heads=2, head_dim=256),
    moe=MoeConfig(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=512,
        shared_intermediate_size=512,
        router="softmax_then_top_k",
        renormalize=True,
        has_shared_gate=True,
    ),
)

NEMOTRON_3_NANO = ModelConfig(
    architecture="NemotronHForCausalLM",
    vocab_size=131072,
    max_position=262144,
    hidden_size=2688,
    intermediate_size=1856,
    norm_eps=1e-5,
    tied_embeddings=False,
    layers=tuple(NEMOTRON_LAYERS[letter] for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    attention=AttentionConfig(num_heads=32, num_kv_heads=2, head_dim=128, scale=128**-0.5),
    state=Mamba2Config(num_heads=64, head_dim=64, state_size=128, num_groups=8, conv_taps=4, has_conv_bias=True),
    moe=MoeConfig(
        num_experts=128,
        experts_per_token=6,
        intermediate_size=1856,
        shared_intermediate_size=3712,
        router="sigmoid",
        renormalize=True,
        has_shared_gate=False,
        scale=2.5,
    ),
    activation="relu_squared",
)

MOE_SHAPES = {
    "granite-4.0-h-tiny": GRANITE_H_TINY,
    "qwen3.5-35b-a3b": QWEN35_35B_A3B,
    "nemotron-3-nano-30b-a3b": NEMOTRON_3_NANO,
}

_SMALL_QWEN = replace(
    QWEN35_4B,
    architecture="Qwen3_5ForCausalLM",
    vocab_size=4096,
    max_position=8192,
    hidden_size=256,
    intermediate_size=768,
    layers=QWEN35_4B.layers[:8],
    attention=_qwen_attention(num_heads=8, num_kv_heads=2, head_dim=32),
    state=GatedDeltaConfig(num_key_heads=8, num_value_heads=8, key_dim=32, value_dim=32, conv_taps=4),
)

CPU_SHAPES = {  # 7 to 9 M parameters
    "granite": replace(
        _SMALL_QWEN,
        architecture="GraniteMoeHybridForCausalLM",
        attention=AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=32, scale=32**-0.5),
        state=Mamba2Config(num_heads=16, head_dim=32, state_size=64, num_groups=1, conv_taps=4, has_conv_bias=True),
    ),
    "qwen35": _SMALL_QWEN,
}


def shrunk(config: ModelConfig) -> ModelConfig:
    """Two layers of each kind, with one hidden unit in sixteen: to try a benchmark where there is no GPU."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, num_experts=16, intermediate_size=32, shared_intermediate_size=64)
    layers = 2 * tuple(dict.fromkeys(config.layers))
    return replace(config, vocab_size=1024, hidden_size=128, intermediate_size=256, layers=layers, moe=moe)


def random_prompts(count: int, num_tokens: int, seed: int = 0, vocabulary: int = 4096) -> list[list[int]]:
    """Prompts of random ids, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, vocabulary, (count, num_tokens), generator=generator).tolist()


def write_shape(config: ModelConfig, folder: Path) -> Path:
    """Writes a dense model's folder without weights; `headrace.models.weights.load_config` reads `config` back."""
    assert config.moe is None, "no benchmark loads mixtures of experts from folders"
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODELS / "headrace-tiny-qwen3.5" / file, folder)
    family_fields = _delta_fields if isinstance(config.state, GatedDeltaConfig) else _mamba_fields
    (folder / "config.json").write_text(json.dumps(_common_fields(config) | family_fields(config), indent=1))
    return folder


def write_weights(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes random weights for the shape in `folder`, initialised and saved by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
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
        "intermediate_size": config.intermediate_size,
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
    rotary_share = attention.rotary_dim / attention.head_dim
    return {
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention" if e.mixer == "attention" else "linear_attention" for e in config.layers],
        "head_dim": attention.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta,
            "partial_rotary_factor": rotary_share,
        },
        "linear_num_key_heads": state.num_key_heads,
        "linear_num_value_heads": state.num_value_heads,
        "linear_key_head_dim": state.key_dim,
        "linear_value_head_dim": state.value_dim,
        "linear_conv_kernel_dim": state.conv_taps,
    }
