"""The FLOPs and weights that one token costs, for eviction and benchmarks."""

from __future__ import annotations

from typing import assert_never

from headrace.models.config import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    ModelConfig,
    ShortConvConfig,
)


def attention_parity_position(config: ModelConfig) -> float:
    """The position at which a token's attention to its prefix costs as many FLOPs as all its other work."""
    attention, latent = config.attention, config.attention.latent
    if latent is None:
        query_and_value = 2 * attention.head_dim
    else:  # of a prompt, whose keys and values are expanded
        query_and_value = latent.key_dim + latent.shared_key_dim + latent.value_dim
    # Two products, QK and PV, of a multiply and an add each.
    per_position = 2 * attention.num_heads * query_and_value * config.num_attention_layers
    linear = sum(2 * _weights(config, layer) for layer in config.layers)
    return linear / per_position


def num_weights(config: ModelConfig) -> int:
    """Weights that one token is multiplied by: those of all layers and of the head (the embedding, if tied)."""
    return sum(_weights(config, layer) for layer in config.layers) + config.vocab_size * config.hidden_size


def num_weights_met(config: ModelConfig, num_tokens: int) -> float:
    """Weights that any of so many tokens is multiplied by, if they choose their experts at random."""
    moe = config.moe
    if moe is None:
        return num_weights(config)
    reached = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** num_tokens)
    num_layers = sum(layer.feed_forward == "moe" for layer in config.layers)
    return num_weights(config) + num_layers * (reached - moe.experts_per_token) * _expert_weights(config)


def _weights(config: ModelConfig, layer: LayerConfig) -> int:
    """Weights of one layer that one token is multiplied by; the cost of a state's update is left out."""
    match layer.mixer:
        case "attention":
            mixer = _attention_weights(config)
        case "state":
            mixer = _state_weights(config)
        case "both":
            mixer = _attention_weights(config) + _state_weights(config)
        case None:
            mixer = 0
        case unknown:
            assert_never(unknown)
    return mixer + _feed_forward_weights(config, layer)


def _attention_weights(config: ModelConfig) -> int:
    attention, latent = config.attention, config.attention.latent
    if latent is not None:
        own = latent.key_dim + latent.value_dim
        rows = attention.num_heads * (own + latent.shared_key_dim) + attention.head_dim
        return config.hidden_size * rows + attention.num_heads * own * latent.size
    queries = attention.num_heads * (2 if attention.has_output_gate else 1)
    heads = queries + 2 * attention.num_kv_heads + attention.num_heads  # the last term is the output projection
    return config.hidden_size * attention.head_dim * heads


def _state_weights(config: ModelConfig) -> int:
    match config.state:
        case Mamba1Config() as state:
            within = state.inner_size * (2 * state.dt_rank + 2 * state.state_size)  # to dt, B and C, and from dt
            return config.hidden_size * 3 * state.inner_size + within
        case Mamba2Config() as state:
            rows = 2 * state.inner_size + state.conv_channels + state.num_heads
        case GatedDeltaConfig() as state:
            rows = state.conv_channels + 2 * state.value_size + 2 * state.num_value_heads
        case KimiDeltaConfig() as state:
            low_rank = 2 * state.head_dim * (config.hidden_size + state.inner_size)  # both gates
            return config.hidden_size * (4 * state.inner_size + state.num_heads) + low_rank
        case ShortConvConfig() as state:
            rows = 4 * state.conv_channels
        case unknown:
            assert_never(unknown)
    return config.hidden_size * rows


def _feed_forward_weights(config: ModelConfig, layer: LayerConfig) -> int:
    match layer.feed_forward:
        case "dense":
            return (config.up_matrices + 1) * config.hidden_size * config.intermediate_size
        case "moe":
            return _moe_weights(config)
        case None:
            return 0
        case unknown:
            assert_never(unknown)


def _moe_weights(config: ModelConfig) -> int:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "ModelConfig refuses such layers without it"
    routed = moe.experts_per_token * _expert_weights(config)
    shared = (config.up_matrices + 1) * moe.shared_intermediate_size * hidden
    latent = 2 * hidden * (moe.latent_size or 0)
    return routed + shared + latent + hidden * moe.num_experts


def _expert_weights(config: ModelConfig) -> int:
    """Weights of one routed expert of one layer."""
    moe = config.moe
    assert moe is not None
    return (config.up_matrices + 1) * moe.intermediate_size * (moe.latent_size or config.hidden_size)
