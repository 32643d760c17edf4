"""Granite 4 H: Mamba2 and attention without positional encoding, dense or a mixture beside a shared MLP.

Bamba is its ancestor: the same mixers, half-rotary attention, a dense MLP under other names.
"""

import torch

from headrace.kernels.dense.linear import LinearWeight
from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import AttentionConfig, LayerConfig, Mamba2Config, ModelConfig, MoeConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import MixtureOfExperts, SoftmaxRouter, SwiGlu
from headrace.models.layers.mamba2 import Mamba2
from headrace.models.model import Family
from headrace.models.raw_config import RawConfig, even_share
from headrace.models.weight_files import WeightSource


def read_granite(raw: RawConfig) -> ModelConfig:
    raw.require("position_embedding_type", "nope", "rope")
    rotates = raw.get("position_embedding_type", "nope") == "rope"
    head_dim = _head_dim(raw)
    num_experts = raw.count("num_local_experts", 0, least=0)
    return ModelConfig(
        **_common_fields(raw),
        intermediate_size=raw.count("shared_intermediate_size"),
        layers=tuple(LayerConfig(mixer, "moe" if num_experts else "dense") for mixer in raw.mixers(lambda _: "state")),
        attention=AttentionConfig(
            num_heads=raw.count("num_attention_heads"),
            num_kv_heads=raw.count("num_key_value_heads", raw.count("num_attention_heads")),
            head_dim=head_dim,
            scale=raw.number("attention_multiplier", 1.0),
            rotary_dim=head_dim if rotates else 0,
            rope_theta=raw.rope_theta(),
            rope_scaling=raw.rope_scaling() if rotates else None,
        ),
        moe=MoeConfig(
            num_experts=num_experts,
            experts_per_token=raw.count("num_experts_per_tok"),
            intermediate_size=raw.count("intermediate_size"),
            shared_intermediate_size=raw.count("shared_intermediate_size"),
            router="top_k_then_softmax",
            renormalize=False,
            has_shared_gate=False,
        )
        if num_experts
        else None,
        embedding_multiplier=raw.number("embedding_multiplier", 1.0),
        residual_multiplier=raw.number("residual_multiplier", 1.0),
        logits_divisor=raw.number("logits_scaling", 1.0),
    )


def read_bamba(raw: RawConfig) -> ModelConfig:
    raw.require("mlp_bias", False)
    attention_layers = raw.layer_numbers("attn_layer_indices")
    head_dim = _head_dim(raw)
    mixers = raw.mixers(lambda layer: "attention" if layer in attention_layers else "state")
    return ModelConfig(
        **_common_fields(raw),
        intermediate_size=raw.count("intermediate_size"),
        layers=tuple(LayerConfig(mixer, "dense") for mixer in mixers),
        attention=AttentionConfig(
            num_heads=raw.count("num_attention_heads"),
            num_kv_heads=raw.count("num_key_value_heads", raw.count("num_attention_heads")),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary_dim=head_dim // 2,  # fixed by the architecture
            rope_theta=raw.rope_theta(),
            rope_scaling=raw.rope_scaling(),
        ),
        moe=None,
    )


def _head_dim(raw: RawConfig) -> int:
    return even_share(raw.count("hidden_size"), "hidden_size", raw.count("num_attention_heads"), "num_attention_heads")


def _common_fields(raw: RawConfig) -> dict:
    raw.require("hidden_act", "silu")
    raw.require("attention_bias", False)
    raw.require("mamba_proj_bias", False)
    dt_min, dt_max = raw.limits("time_step_limit", (0.0, float("inf")))
    return {
        "architecture": raw.architecture,
        "vocab_size": raw.count("vocab_size"),
        "max_position": raw.max_position(),
        "hidden_size": raw.count("hidden_size"),
        "norm_eps": raw.number("rms_norm_eps"),
        "tied_embeddings": raw.flag("tie_word_embeddings", False),
        "eos_token_ids": raw.eos_token_ids,
        "state": Mamba2Config(
            num_heads=raw.count("mamba_n_heads"),
            head_dim=_state_head_dim(raw),
            state_size=raw.count("mamba_d_state"),
            num_groups=raw.count("mamba_n_groups"),
            conv_taps=raw.count("mamba_d_conv", least=2),
            has_conv_bias=raw.flag("mamba_conv_bias", True),
            dt_min=dt_min,
            dt_max=dt_max,
        ),
    }


def _state_head_dim(raw: RawConfig) -> int:
    if raw.get("mamba_d_head", "auto") != "auto":
        return raw.count("mamba_d_head")
    inner = raw.count("mamba_expand", 2) * raw.count("hidden_size")
    return even_share(inner, "mamba_expand * hidden_size", raw.count("mamba_n_heads"), "mamba_n_heads")


def load_granite_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    mlp = f"{prefix}.shared_mlp"
    shared = SwiGlu(
        gate_up=LinearWeight(weights.matrix(f"{mlp}.input_linear.weight", (2 * inner, hidden))),
        down=LinearWeight(weights.matrix(f"{mlp}.output_linear.weight", (hidden, inner))),
    )
    feed_forward: SwiGlu | MixtureOfExperts = shared
    if config.moe is not None:
        feed_forward = _load_moe(weights, f"{prefix}.block_sparse_moe", config.moe, shared)
    return (
        MixerBranch(
            _load_mixer(weights, prefix, config, layer),
            weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        ),
        FeedForwardBranch(
            feed_forward, weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,), torch.float32)
        ),
    )


def _load_moe(weights: WeightSource, prefix: str, moe: MoeConfig, shared: SwiGlu) -> MixtureOfExperts:
    num, inner, hidden = moe.num_experts, moe.intermediate_size, shared.down.out_features
    return MixtureOfExperts(
        router=SoftmaxRouter.of(moe, weights.take(f"{prefix}.router.layer.weight", (num, hidden))),
        up=weights.experts(f"{prefix}.input_linear.weight", (num, 2 * inner, hidden)),
        down=weights.experts(f"{prefix}.output_linear.weight", (num, hidden, inner)),
        shared=shared,
    )


def load_bamba_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden = config.hidden_size
    return (
        MixerBranch(
            _load_mixer(weights, prefix, config, layer),
            weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        ),
        FeedForwardBranch(
            SwiGlu.load(weights, f"{prefix}.feed_forward", hidden, config.intermediate_size),
            weights.take(f"{prefix}.pre_ff_layernorm.weight", (hidden,), torch.float32),
        ),
    )


def _load_mixer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> Attention | Mamba2:
    index, hidden, eps = config.mixer_index(layer), config.hidden_size, config.norm_eps
    if config.layers[layer].mixer == "attention":
        return Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, eps)
    assert isinstance(config.state, Mamba2Config)
    return Mamba2.load(weights, f"{prefix}.mamba", config.state, index, hidden, eps)


GRANITE = Family(read_granite, load_granite_layer)
BAMBA = Family(read_bamba, load_bamba_layer, final_norm="final_layernorm")
