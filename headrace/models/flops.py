"""How many FLOPs a token costs, as far as caches and benchmarks want to know."""

from __future__ import annotations

from headrace.models.config import LayerConfig, Mamba2Config, ModelConfig


def attention_tokens(config: ModelConfig) -> float:
    """The position at which attending to the prefix costs a token as much as all that does not depend on it."""
    attention = config.attention
    # Two products, QK and PV, of a multiply and an add each.
    per_position = 4 * attention.num_heads * attention.head_dim * config.num_attention_layers
    linear = sum(2 * _weights(config, layer) for layer in config.layers)
    return linear / per_position


def num_weights(config: ModelConfig) -> int:
    """Those that one token meets: of all layers and of the head, which is the embedding where they are tied."""
    return sum(_weights(config, layer) for layer in config.layers) + config.vocab_size * config.hidden_size


def _weights(config: ModelConfig, layer: LayerConfig) -> int:
    """Weights that one token meets in one layer; what a state's update costs beside them is left out."""
    mixer = _attention_weights(config) if layer.mixer == "attention" else _state_weights(config)
    return mixer + _feed_forward_weights(config, layer)


def _attention_weights(config: ModelConfig) -> int:
    attention = config.attention
    queries = attention.num_heads * (2 if attention.has_output_gate else 1)
    heads = queries + 2 * attention.num_kv_heads + attention.num_heads  # the last are those of the output
    return config.hidden_size * attention.head_dim * heads


def _state_weights(config: ModelConfig) -> int:
    state = config.state
    if isinstance(state, Mamba2Config):
        rows = 2 * state.inner_size + state.conv_channels + state.num_heads
    else:
        rows = state.conv_channels + 2 * state.value_size + 2 * state.num_value_heads
    return config.hidden_size * rows


def _feed_forward_weights(config: ModelConfig, layer: LayerConfig) -> int:
    if layer.feed_forward == "dense":
        return 3 * config.hidden_size * config.intermediate_size
    moe = config.moe
    assert moe is not None, "ModelConfig refuses such layers without it"
    intermediate = moe.experts_per_token * moe.intermediate_size + moe.shared_intermediate_size
    return config.hidden_size * (3 * intermediate + moe.num_experts)
