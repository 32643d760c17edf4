"""Jamba (1, 1.5, 2, Reasoning): Mamba1 and attention without positional encoding, some layers mixtures of experts.

transformers 5.23 drops the recurrent state where it goes on with several tokens at once: prompts in one pass and single
tokens are right.
"""

from collections.abc import Callable

import torch

from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import AttentionConfig, LayerConfig, Mamba1Config, ModelConfig, ModelError, MoeConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import MixtureOfExperts, SoftmaxRouter, SwiGlu, load_swiglu_experts
from headrace.models.layers.mamba1 import Mamba1
from headrace.models.model import Family
from headrace.models.raw_config import RawConfig, even_share
from headrace.models.weight_files import WeightSource


def read_jamba(raw: RawConfig) -> ModelConfig:
    raw.require("hidden_act", "silu")
    raw.require("mamba_proj_bias", False)
    raw.require("mamba_inner_layernorms", True)
    raw.require("sliding_window", None)
    hidden, num_heads = raw.count("hidden_size"), raw.count("num_attention_heads")
    num_experts = raw.count("num_experts", 16)
    attends = _every(raw, "attn_layer", 8, 4)
    has_experts = _every(raw, "expert_layer", 2, 1)
    mixers = raw.mixers(lambda layer: "attention" if attends(layer) else "state")
    layers = tuple(
        LayerConfig(mixer, "moe" if num_experts > 1 and has_experts(layer) else "dense")
        for layer, mixer in enumerate(mixers)
    )
    head_dim = raw.count("head_dim", 0, least=0) or even_share(hidden, "hidden_size", num_heads, "num_attention_heads")
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.count("max_position_embeddings", 262144),
        hidden_size=hidden,
        intermediate_size=raw.count("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=layers,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=raw.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
        ),
        state=Mamba1Config(
            inner_size=raw.count("mamba_expand", 2) * hidden,
            state_size=raw.count("mamba_d_state", 16),
            dt_rank=_dt_rank(raw, hidden),
            conv_taps=raw.count("mamba_d_conv", 4, least=2),
            has_conv_bias=raw.flag("mamba_conv_bias", True),
        ),
        moe=_read_moe(raw, num_experts) if any(layer.feed_forward == "moe" for layer in layers) else None,
        eos_token_ids=raw.eos_token_ids,
    )


def _every(raw: RawConfig, name: str, period: int, offset: int) -> Callable[[int], bool]:
    """True for the layers at `NAME_offset` in each `NAME_period` layers."""
    period, offset = raw.count(f"{name}_period", period), raw.count(f"{name}_offset", offset, least=0)
    if offset >= period:
        raise ModelError(f"{name}_offset {offset}: must be below {name}_period {period}")
    return lambda layer: layer % period == offset


def _dt_rank(raw: RawConfig, hidden: int) -> int:
    return -(-hidden // 16) if raw.get("mamba_dt_rank", "auto") == "auto" else raw.count("mamba_dt_rank")


def _read_moe(raw: RawConfig, num_experts: int) -> MoeConfig:
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=raw.count("num_experts_per_tok", 2),
        intermediate_size=raw.count("intermediate_size"),
        shared_intermediate_size=0,
        router="softmax_then_top_k",
        renormalize=False,
        has_shared_gate=False,
    )


def load_jamba_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden = config.hidden_size
    return (
        MixerBranch(
            _load_mixer(weights, prefix, config, layer),
            weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        ),
        FeedForwardBranch(
            _load_feed_forward(weights, f"{prefix}.feed_forward", config, layer),
            weights.take(f"{prefix}.pre_ff_layernorm.weight", (hidden,), torch.float32),
        ),
    )


def _load_mixer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> Attention | Mamba1:
    index, hidden, eps = config.mixer_index(layer), config.hidden_size, config.norm_eps
    if config.layers[layer].mixer == "attention":
        return Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, eps)
    assert isinstance(config.state, Mamba1Config)
    return Mamba1.load(weights, f"{prefix}.mamba", config.state, index, hidden, eps)


def _load_feed_forward(
    weights: WeightSource, prefix: str, config: ModelConfig, layer: int
) -> SwiGlu | MixtureOfExperts:
    moe, hidden, inner = config.moe, config.hidden_size, config.intermediate_size
    if config.layers[layer].feed_forward == "dense" or moe is None:
        return SwiGlu.load(weights, prefix, hidden, inner)
    router = weights.take(f"{prefix}.router.weight", (moe.num_experts, hidden))
    names = ("gate_proj", "up_proj", "down_proj")
    up, down = load_swiglu_experts(weights, f"{prefix}.experts", moe.num_experts, inner, hidden, names)
    return MixtureOfExperts(router=SoftmaxRouter.of(moe, router), up=up, down=down, shared=None)


JAMBA = Family(read_jamba, load_jamba_layer, final_norm="final_layernorm")
