"""Granite 4 H: Mamba2 and attention without positional encoding, dense or a mixture beside a shared MLP.

Bamba is its ancestor: the same mixers, half-rotary attention, a dense MLP under other names.
"""

import torch

from headrace.kernels.dense.linear import LinearWeight
from headrace.models.config import AttentionConfig, LayerConfig, Mamba2Config, ModelConfig, MoeConfig, RawConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import MixtureOfExperts, SwiGlu
from headrace.models.layers.mamba2 import Mamba2
from headrace.models.model import DecoderLayer, Family
from headrace.models.weight_files import WeightSource


def read_granite(raw: RawConfig) -> ModelConfig:
    raw.require("position_embedding_type", "nope", "rope")
    rotates = raw.get("position_embedding_type", "nope") == "rope"
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    num_experts = raw.get("num_local_experts", 0)
    mixers = raw.layer_mixers() or ["state"] * raw["num_hidden_layers"]
    return ModelConfig(
        **_common_fields(raw),
        intermediate_size=raw["shared_intermediate_size"],
        layers=tuple(LayerConfig(mixer, "moe" if num_experts else "dense") for mixer in mixers),
        attention=AttentionConfig(
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            head_dim=head_dim,
            scale=raw.get("attention_multiplier", 1.0),
            rotary_dim=head_dim if rotates else 0,
            rope_theta=raw.rope_theta(),
        ),
        moe=MoeConfig(
            num_experts=num_experts,
            experts_per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["intermediate_size"],
            shared_intermediate_size=raw["shared_intermediate_size"],
            router="top_k_then_softmax",
            renormalize=False,
            has_shared_gate=False,
        )
        if num_experts
        else None,
        embedding_multiplier=raw.get("embedding_multiplier", 1.0),
        residual_multiplier=raw.get("residual_multiplier", 1.0),
        logits_divisor=raw.get("logits_scaling", 1.0),
    )


def read_bamba(raw: RawConfig) -> ModelConfig:
    raw.require("mlp_bias", False)
    attention_layers = set(raw.get("attn_layer_indices", []))
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    return ModelConfig(
        **_common_fields(raw),
        intermediate_size=raw["intermediate_size"],
        layers=tuple(
            LayerConfig("attention" if i in attention_layers else "state", "dense")
            for i in range(raw["num_hidden_layers"])
        ),
        attention=AttentionConfig(
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary_dim=head_dim // 2,  # fixed by the architecture
            rope_theta=raw.rope_theta(),
        ),
        moe=None,
    )


def _common_fields(raw: RawConfig) -> dict:
    raw.require("hidden_act", "silu")
    raw.require("attention_bias", False)
    raw.require("mamba_proj_bias", False)
    inner = raw.get("mamba_expand", 2) * raw["hidden_size"]
    head_dim = raw.get("mamba_d_head", "auto")
    dt_min, dt_max = (_number(limit) for limit in raw.get("time_step_limit", (0.0, float("inf"))))
    return {
        "architecture": raw.architecture,
        "vocab_size": raw["vocab_size"],
        "max_position": raw["max_position_embeddings"],
        "hidden_size": raw["hidden_size"],
        "norm_eps": raw["rms_norm_eps"],
        "tied_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": raw.eos_token_ids,
        "state": Mamba2Config(
            num_heads=raw["mamba_n_heads"],
            head_dim=inner // raw["mamba_n_heads"] if head_dim == "auto" else head_dim,
            state_size=raw["mamba_d_state"],
            num_groups=raw["mamba_n_groups"],
            conv_taps=raw["mamba_d_conv"],
            has_conv_bias=raw.get("mamba_conv_bias", True),
            dt_min=dt_min,
            dt_max=dt_max,
        ),
    }


def _number(value: float | dict) -> float:
    """transformers writes an infinite limit as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def load_granite_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> DecoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    mlp = f"{prefix}.shared_mlp"
    shared = SwiGlu(
        gate_up=LinearWeight(weights.take(f"{mlp}.input_linear.weight", (2 * inner, hidden))),
        down=LinearWeight(weights.take(f"{mlp}.output_linear.weight", (hidden, inner))),
    )
    feed_forward: SwiGlu | MixtureOfExperts = shared
    if config.moe is not None:
        feed_forward = _load_moe(weights, f"{prefix}.block_sparse_moe", config.moe, shared)
    return DecoderLayer(
        mixer=_load_mixer(weights, prefix, config, layer),
        feed_forward=feed_forward,
        mixer_norm=weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        feed_forward_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,), torch.float32),
        norm_eps=config.norm_eps,
        residual_multiplier=config.residual_multiplier,
    )


def _load_moe(weights: WeightSource, prefix: str, moe: MoeConfig, shared: SwiGlu) -> MixtureOfExperts:
    num, inner, hidden = moe.num_experts, moe.intermediate_size, shared.down.out_features
    return MixtureOfExperts(
        config=moe,
        router=weights.take(f"{prefix}.router.layer.weight", (num, hidden)),
        gate_up=weights.take(f"{prefix}.input_linear.weight", (num, 2 * inner, hidden)),
        down=weights.take(f"{prefix}.output_linear.weight", (num, hidden, inner)),
        shared=shared,
        shared_gate=None,
    )


def load_bamba_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> DecoderLayer:
    hidden = config.hidden_size
    return DecoderLayer(
        mixer=_load_mixer(weights, prefix, config, layer),
        feed_forward=SwiGlu.load(weights, f"{prefix}.feed_forward", hidden, config.intermediate_size),
        mixer_norm=weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        feed_forward_norm=weights.take(f"{prefix}.pre_ff_layernorm.weight", (hidden,), torch.float32),
        norm_eps=config.norm_eps,
        residual_multiplier=config.residual_multiplier,
    )


def _load_mixer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> Attention | Mamba2:
    index, hidden, eps = config.mixer_index(layer), config.hidden_size, config.norm_eps
    if config.layers[layer].mixer == "attention":
        return Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, eps)
    assert isinstance(config.state, Mamba2Config)
    return Mamba2.load(weights, f"{prefix}.mamba", config.state, index, hidden, eps)


GRANITE = Family(read_granite, load_granite_layer)
BAMBA = Family(read_bamba, load_bamba_layer, final_norm="final_layernorm")
