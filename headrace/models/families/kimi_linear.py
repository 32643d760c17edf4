"""Kimi-Linear: Kimi delta attention, and latent attention without positional encoding; mixtures of experts."""

from dataclasses import replace
from typing import Literal

import torch

from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import (
    AttentionConfig,
    KimiDeltaConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    MoeConfig,
)
from headrace.models.layers.feed_forward import MixtureOfExperts, SigmoidRouter, SwiGlu, load_swiglu_experts
from headrace.models.layers.kimi_delta import KimiDelta
from headrace.models.layers.latent_attention import LatentAttention
from headrace.models.model import Family
from headrace.models.raw_config import Mixer, RawConfig, shown
from headrace.models.weight_files import WeightSource

LATENT_NORM_EPS = 1e-6  # of latents, whatever the config gives for the other norms
FeedForward = Literal["dense", "moe"]
FEED_FORWARDS: dict[str, FeedForward] = {"dense": "dense", "sparse": "moe"}
LOCAL_NAMES = {  # hub files have these fields in an object of their own
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def read_kimi_linear(raw: RawConfig) -> ModelConfig:
    raw.require("hidden_act", "silu")
    raw.require("q_lora_rank", None)
    raw.require("attention_bias", False)
    raw.require("mla_use_nope", True)
    heads = raw.count("num_attention_heads")
    raw.require("num_key_value_heads", heads)
    latent = LatentConfig(
        size=raw.count("kv_lora_rank"),
        key_dim=raw.count("qk_nope_head_dim"),
        shared_key_dim=raw.count("qk_rope_head_dim"),
        value_dim=raw.count("v_head_dim"),
    )
    delta = _delta_fields(raw)
    mixers = delta.mixers(lambda layer: _listed_mixer(delta, layer))
    kinds = _feed_forwards(raw, len(mixers))
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.count("model_max_length", raw.get("max_position_embeddings", None)),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=tuple(LayerConfig(mixer, kind) for mixer, kind in zip(mixers, kinds, strict=True)),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=latent.size + latent.shared_key_dim,
            scale=(latent.key_dim + latent.shared_key_dim) ** -0.5,
            latent=latent,
        ),
        state=KimiDeltaConfig(
            num_heads=delta.count("num_heads"),
            head_dim=delta.count("head_dim"),
            conv_taps=delta.count("short_conv_kernel_size", 4, least=2),
        ),
        moe=_read_moe(raw) if "moe" in kinds else None,
        eos_token_ids=raw.eos_token_ids,
    )


def _delta_fields(raw: RawConfig) -> RawConfig:
    """The config with the delta layers' fields in front, under the names of hub files."""
    inner = raw.get("linear_attn_config", {})
    if not isinstance(inner, dict):
        raise ModelError(f"linear_attn_config {shown(inner)}: must be an object")
    local = {name: raw.text.get(local_name) for name, local_name in LOCAL_NAMES.items()}
    return replace(raw, text={**raw.text, **local, **inner})


def _listed_mixer(delta: RawConfig, layer: int) -> Mixer:
    """Hub files list the layers of each kind; they count from 1."""
    is_attention, is_delta = (layer + 1 in delta.layer_numbers(name) for name in ("full_attn_layers", "kda_layers"))
    if is_attention == is_delta:
        raise ModelError(f"layer {layer + 1} is in both or none of full_attn_layers and kda_layers: must be in one")
    return "attention" if is_attention else "state"


def _feed_forwards(raw: RawConfig, num_layers: int) -> list[FeedForward]:
    raw.require("moe_layer_freq", 1)
    num_dense = raw.count("first_k_dense_replace", 1, least=0)
    listed = raw.get("mlp_layer_types", ["dense" if i < num_dense else "sparse" for i in range(num_layers)])
    if not isinstance(listed, list) or len(listed) != num_layers or not all(kind in FEED_FORWARDS for kind in listed):
        raise ModelError(f"mlp_layer_types {shown(listed)}: must be a list of {num_layers} of dense and sparse")
    return [FEED_FORWARDS[kind] for kind in listed]


def _read_moe(raw: RawConfig) -> MoeConfig:
    raw.require("moe_router_activation_func", "sigmoid")
    raw.require("use_grouped_topk", True)
    inner = raw.count("moe_intermediate_size")
    return MoeConfig(
        num_experts=raw.count("num_experts"),
        experts_per_token=raw.count("num_experts_per_token"),
        intermediate_size=inner,
        shared_intermediate_size=inner * raw.count("num_shared_experts", 1),
        router="sigmoid",
        renormalize=raw.flag("moe_renormalize", True),
        has_shared_gate=False,
        num_groups=raw.count("num_expert_group", 1),
        chosen_groups=raw.count("topk_group", 1),
        scale=raw.number("routed_scaling_factor", 1.0),
    )


def load_kimi_linear_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden, kind, index = config.hidden_size, config.layers[layer], config.mixer_index(layer)
    mixer: LatentAttention | KimiDelta
    if kind.mixer == "attention":
        mixer = LatentAttention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, LATENT_NORM_EPS)
    else:
        assert isinstance(config.state, KimiDeltaConfig)
        mixer = KimiDelta.load(weights, f"{prefix}.self_attn", config.state, index, hidden, config.norm_eps)
    mixer_norm, norm = (
        weights.take(f"{prefix}.{name}.weight", (hidden,), torch.float32)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return (
        MixerBranch(mixer, mixer_norm),
        FeedForwardBranch(_load_feed_forward(weights, prefix, config, kind), norm),
    )


def _load_feed_forward(
    weights: WeightSource, prefix: str, config: ModelConfig, kind: LayerConfig
) -> SwiGlu | MixtureOfExperts:
    moe, hidden, experts = config.moe, config.hidden_size, f"{prefix}.block_sparse_moe"
    if kind.feed_forward == "dense" or moe is None:
        # transformers writes dense ones as if they were experts.
        written = experts if f"{experts}.gate_proj.weight" in weights.remaining else f"{prefix}.mlp"
        return SwiGlu.load(weights, written, hidden, config.intermediate_size)
    num, inner = moe.num_experts, moe.intermediate_size
    up, down = load_swiglu_experts(weights, f"{experts}.experts", num, inner, hidden, ("w1", "w3", "w2"))
    return MixtureOfExperts(
        router=SigmoidRouter.of(
            moe,
            weights.take(f"{experts}.gate.weight", (num, hidden), torch.float32),
            weights.take(f"{experts}.gate.e_score_correction_bias", (num,), torch.float32),
        ),
        up=up,
        down=down,
        shared=SwiGlu.load(weights, f"{experts}.shared_experts", hidden, moe.shared_intermediate_size),
    )


KIMI_LINEAR = Family(read_kimi_linear, load_kimi_linear_layer)
