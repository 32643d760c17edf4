"""LFM2 and LFM2.5, dense and mixtures of experts.

Gated short convolutions, and attention with normed queries and keys and full rotation.
"""

import torch

from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import AttentionConfig, LayerConfig, ModelConfig, MoeConfig, ShortConvConfig
from headrace.models.layers.attention import Attention, AttentionNames
from headrace.models.layers.feed_forward import MixtureOfExperts, SigmoidRouter, SwiGlu, load_swiglu_experts
from headrace.models.layers.short_conv import ShortConv
from headrace.models.model import Family
from headrace.models.raw_config import RawConfig
from headrace.models.weight_files import WeightSource

NAMES = AttentionNames("out_proj", "q_layernorm", "k_layernorm", norm_offset=0.0)
ROPE_THETA = 1e6  # where the file names none
SMALLEST_SUM = 1e-6  # added to the sum of the chosen experts' scores


def read_lfm2(raw: RawConfig) -> ModelConfig:
    raw.require("conv_bias", False)
    attention_layers = raw.layer_numbers("full_attn_idxs")
    mixers = raw.mixers(lambda layer: "attention" if layer in attention_layers else "state")
    num_dense = _num_dense_layers(raw, len(mixers))
    hidden, num_heads = raw.count("hidden_size"), raw.count("num_attention_heads")
    head_dim = raw.count("head_dim", max(hidden // num_heads, 1))
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.max_position(),
        hidden_size=hidden,
        intermediate_size=raw.count("intermediate_size") if _has_experts(raw) else _intermediate_size(raw),
        norm_eps=raw.number("norm_eps"),
        tied_embeddings=raw.flag("tie_embedding", raw.flag("tie_word_embeddings", True)),
        layers=tuple(LayerConfig(mixer, "dense" if i < num_dense else "moe") for i, mixer in enumerate(mixers)),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=raw.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary_dim=head_dim,
            rope_theta=raw.rope_theta(ROPE_THETA),
            rope_scaling=raw.rope_scaling(),
            has_qk_norm=True,
        ),
        state=ShortConvConfig(conv_channels=hidden, conv_taps=raw.count("conv_L_cache", least=2)),
        moe=_read_moe(raw) if num_dense < len(mixers) else None,
        eos_token_ids=raw.eos_token_ids,
    )


def _has_experts(raw: RawConfig) -> bool:
    return raw.architecture == "Lfm2MoeForCausalLM"


def _num_dense_layers(raw: RawConfig, num_layers: int) -> int:
    """The first layers' feed-forwards are dense in any case."""
    return raw.count("num_dense_layers", 2, least=0) if _has_experts(raw) else num_layers


def _read_moe(raw: RawConfig) -> MoeConfig:
    return MoeConfig(
        num_experts=raw.count("num_experts"),
        experts_per_token=raw.count("num_experts_per_tok"),
        intermediate_size=raw.count("moe_intermediate_size"),
        shared_intermediate_size=0,
        router="sigmoid",
        renormalize=raw.flag("norm_topk_prob", True),
        has_shared_gate=False,
        scale=raw.number("routed_scaling_factor", 1.0),
        has_bias=raw.flag("use_expert_bias", True),
    )


def _intermediate_size(raw: RawConfig) -> int:
    """The feed-forward's inner size: two thirds of the number in the file, times a factor, rounded up to a multiple."""
    size = raw.count("block_ff_dim", 0, least=0) or raw.count("intermediate_size")
    if not raw.flag("block_auto_adjust_ff_dim", True):
        return size
    scaled = int(2 * size / 3)
    if raw.text.get("block_ffn_dim_multiplier", 1.0) is None:  # neither a factor nor a multiple
        return scaled
    scaled = int(raw.number("block_ffn_dim_multiplier", 1.0) * scaled)
    multiple = raw.count("block_multiple_of", 256)
    return -(-scaled // multiple) * multiple


def load_lfm2_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden = config.hidden_size
    return (
        MixerBranch(
            _load_mixer(weights, prefix, config, layer),
            weights.take(f"{prefix}.operator_norm.weight", (hidden,), torch.float32),
        ),
        FeedForwardBranch(
            _load_feed_forward(weights, f"{prefix}.feed_forward", config, layer),
            weights.take(f"{prefix}.ffn_norm.weight", (hidden,), torch.float32),
        ),
    )


def _load_mixer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> Attention | ShortConv:
    index, hidden = config.mixer_index(layer), config.hidden_size
    if config.layers[layer].mixer == "attention":
        attention = config.attention
        return Attention.load(weights, f"{prefix}.self_attn", attention, index, hidden, config.norm_eps, NAMES)
    assert isinstance(config.state, ShortConvConfig)
    return ShortConv.load(weights, f"{prefix}.conv", config.state, index)


def _load_feed_forward(
    weights: WeightSource, prefix: str, config: ModelConfig, layer: int
) -> SwiGlu | MixtureOfExperts:
    moe, hidden = config.moe, config.hidden_size
    if config.layers[layer].feed_forward == "dense" or moe is None:
        inner = config.intermediate_size
        gate = weights.matrix(f"{prefix}.w1.weight", (inner, hidden))
        up = weights.matrix(f"{prefix}.w3.weight", (inner, hidden))
        down = weights.matrix(f"{prefix}.w2.weight", (hidden, inner))
        return SwiGlu(LinearWeight(stack_rows((gate, up))), LinearWeight(down))
    num, inner = moe.num_experts, moe.intermediate_size
    matrix = weights.take(f"{prefix}.gate.weight", (num, hidden), torch.float32)
    bias = weights.take(f"{prefix}.expert_bias", (num,), torch.float32) if moe.has_bias else None
    up, down = load_swiglu_experts(weights, f"{prefix}.experts", num, inner, hidden, ("w1", "w3", "w2"))
    return MixtureOfExperts(
        router=SigmoidRouter.of(moe, matrix, bias, SMALLEST_SUM),
        up=up,
        down=down,
        shared=None,
    )


LFM2 = Family(read_lfm2, load_lfm2_layer, final_norm="embedding_norm")
