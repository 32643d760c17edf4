"""Qwen3.5 (dense and MoE) and Qwen3-Next: gated delta net and gated attention with partial rotation.

Norm weights are stored as offsets from one, except the gated norm of the delta net.
"""

from typing import Literal

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import Matrix, select_rows, stack_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.moe.experts import Experts
from headrace.models.branches import Branch, BranchChain, FeedForwardBranch, MixerBranch
from headrace.models.config import AttentionConfig, GatedDeltaConfig, LayerConfig, ModelConfig, MoeConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import MixtureOfExperts, SoftmaxRouter, SwiGlu, load_swiglu_experts
from headrace.models.layers.gated_delta import GatedDelta
from headrace.models.model import Family
from headrace.models.mtp import MtpLayer
from headrace.models.raw_config import RawConfig
from headrace.models.weight_files import WeightSource

NORM_OFFSET = 1.0


def read_qwen(raw: RawConfig) -> ModelConfig:
    raw.require("hidden_act", "silu")
    raw.require("attention_bias", False)
    interval = raw.count("full_attention_interval", 4)
    mixers = raw.mixers(lambda layer: "state" if (layer + 1) % interval else "attention")
    moe = _read_moe(raw) if raw.count("num_experts", 0, least=0) else None
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.max_position(),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size", 0, least=0),
        norm_eps=raw.number("rms_norm_eps"),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=tuple(
            LayerConfig(mixer, feed_forward)
            for mixer, feed_forward in zip(mixers, _feed_forwards(raw, moe, len(mixers)), strict=True)
        ),
        attention=_read_attention(raw),
        state=GatedDeltaConfig(
            num_key_heads=raw.count("linear_num_key_heads"),
            num_value_heads=raw.count("linear_num_value_heads"),
            key_dim=raw.count("linear_key_head_dim"),
            value_dim=raw.count("linear_value_head_dim"),
            conv_taps=raw.count("linear_conv_kernel_dim", least=2),
        ),
        moe=moe,
        eos_token_ids=raw.eos_token_ids,
    )


def _read_attention(raw: RawConfig) -> AttentionConfig:
    head_dim = raw.count("head_dim")
    return AttentionConfig(
        num_heads=raw.count("num_attention_heads"),
        num_kv_heads=raw.count("num_key_value_heads"),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary_dim=int(head_dim * raw.partial_rotary_factor(default=0.25)),
        rope_theta=raw.rope_theta(),
        rope_scaling=raw.rope_scaling(),
        has_qk_norm=True,
        has_output_gate=True,
    )


def _read_moe(raw: RawConfig) -> MoeConfig:
    return MoeConfig(
        num_experts=raw.count("num_experts"),
        experts_per_token=raw.count("num_experts_per_tok"),
        intermediate_size=raw.count("moe_intermediate_size"),
        shared_intermediate_size=raw.count("shared_expert_intermediate_size"),
        router="softmax_then_top_k",
        renormalize=raw.flag("norm_topk_prob", True),
        has_shared_gate=True,
    )


def _feed_forwards(raw: RawConfig, moe: MoeConfig | None, num_layers: int) -> list[Literal["dense", "moe"]]:
    dense, step = raw.layer_numbers("mlp_only_layers"), raw.count("decoder_sparse_step", 1)
    return ["dense" if moe is None or i in dense or (i + 1) % step else "moe" for i in range(num_layers)]


def load_qwen_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    mixer = _load_mixer(weights, prefix, config, layer)
    return _branches(weights, prefix, config, mixer, has_experts=config.layers[layer].feed_forward == "moe")


def _branches(
    weights: WeightSource,
    prefix: str,
    config: ModelConfig,
    mixer: Attention | GatedDelta,
    *,
    has_experts: bool,
) -> tuple[Branch, ...]:
    """A layer around its mixer."""
    hidden = config.hidden_size
    if has_experts:
        feed_forward: SwiGlu | MixtureOfExperts = _load_moe(weights, f"{prefix}.mlp", config)
    else:
        feed_forward = SwiGlu.load(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
    return (
        MixerBranch(mixer, _load_norm(weights, f"{prefix}.input_layernorm", hidden)),
        FeedForwardBranch(feed_forward, _load_norm(weights, f"{prefix}.post_attention_layernorm", hidden)),
    )


def _load_norm(weights: WeightSource, name: str, hidden: int) -> Tensor:
    return NORM_OFFSET + weights.take(f"{name}.weight", (hidden,), torch.float32)


def load_qwen_mtp(weights: WeightSource, config: ModelConfig) -> MtpLayer:
    """From `mtp.*`: one attention layer, with experts if the model has them and the layer has no dense feed-forward.

    Raises ModelError for a checkpoint without them. A second layer, or an embedding of its own, is left over: the
    loader then refuses it by name.
    """
    hidden, prefix = config.hidden_size, "mtp.layers.0"
    has_experts = config.moe is not None and f"{prefix}.mlp.gate_proj.weight" not in weights.remaining
    index = config.num_attention_layers  # in a block, behind the model's own
    attention = Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, config.norm_eps)
    mixer = attention.of_mtp()
    return MtpLayer(
        embedding_norm=_load_norm(weights, "mtp.pre_fc_norm_embedding", hidden),
        hidden_norm=_load_norm(weights, "mtp.pre_fc_norm_hidden", hidden),
        fc=LinearWeight(weights.take("mtp.fc.weight", (hidden, 2 * hidden))),
        chain=BranchChain(
            _branches(weights, prefix, config, mixer, has_experts=has_experts),
            _load_norm(weights, "mtp.norm", hidden),
            config.norm_eps,
            config.residual_multiplier,
        ),
    )


def _load_mixer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> Attention | GatedDelta:
    index, hidden, eps = config.mixer_index(layer), config.hidden_size, config.norm_eps
    if config.layers[layer].mixer == "attention":
        return Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, eps)
    assert isinstance(config.state, GatedDeltaConfig)
    prefix = f"{prefix}.linear_attn"
    fused = f"{prefix}.in_proj_qkvz.weight" in weights.remaining
    load_in_proj = _load_fused_in_proj if fused else _load_split_in_proj
    in_proj, beta_decay = load_in_proj(weights, prefix, config.state, hidden)
    return GatedDelta.load(weights, prefix, config.state, index, in_proj, beta_decay, eps)


def _load_split_in_proj(weights: WeightSource, prefix: str, c: GatedDeltaConfig, hidden: int) -> tuple[Matrix, Tensor]:
    """Qwen3.5's projections: four matrices, already in the order of `GatedDelta.in_proj`."""
    qkv = weights.matrix(f"{prefix}.in_proj_qkv.weight", (c.conv_channels, hidden))
    z = weights.matrix(f"{prefix}.in_proj_z.weight", (c.value_size, hidden))
    b_and_a = [weights.take(f"{prefix}.in_proj_{n}.weight", (c.num_value_heads, hidden)) for n in ("b", "a")]
    return stack_rows((qkv, z)), torch.cat(b_and_a)


def _load_fused_in_proj(weights: WeightSource, prefix: str, c: GatedDeltaConfig, hidden: int) -> tuple[Matrix, Tensor]:
    """Qwen3-Next's projections: two matrices with each key head's rows together (q, k, v, z; b, a)."""
    Hk, value_rows = c.num_key_heads, c.value_size // c.num_key_heads
    num_rows = 2 * c.key_size + 2 * c.value_size
    qkvz = weights.matrix(f"{prefix}.in_proj_qkvz.weight", (num_rows, hidden))
    ba = weights.take(f"{prefix}.in_proj_ba.weight", (2 * c.num_value_heads, hidden))
    by_head = torch.arange(num_rows).view(Hk, -1).split((c.key_dim, c.key_dim, value_rows, value_rows), dim=1)
    in_proj = select_rows(qkvz, torch.cat([rows.flatten() for rows in by_head]))
    return in_proj, ba.view(Hk, 2, -1, hidden).transpose(0, 1).reshape(-1, hidden)


def _load_moe(weights: WeightSource, prefix: str, config: ModelConfig) -> MixtureOfExperts:
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    gate_up, down = _load_experts(weights, f"{prefix}.experts", moe, hidden)
    return MixtureOfExperts(
        router=SoftmaxRouter.of(moe, weights.take(f"{prefix}.gate.weight", (moe.num_experts, hidden))),
        up=gate_up,
        down=down,
        shared=SwiGlu.load(weights, f"{prefix}.shared_expert", hidden, moe.shared_intermediate_size),
        shared_gate=weights.take(f"{prefix}.shared_expert_gate.weight", (1, hidden)),
    )


def _load_experts(weights: WeightSource, prefix: str, moe: MoeConfig, hidden: int) -> tuple[Experts, Experts]:
    """gate_up [E, 2 I, hidden] and down [E, hidden, I], from a matrix for each expert or from stacked tensors."""
    num, inner = moe.num_experts, moe.intermediate_size
    if f"{prefix}.gate_up_proj" in weights.remaining:
        return (
            weights.experts(f"{prefix}.gate_up_proj", (num, 2 * inner, hidden)),
            weights.experts(f"{prefix}.down_proj", (num, hidden, inner)),
        )
    return load_swiglu_experts(weights, prefix, num, inner, hidden, ("gate_proj", "up_proj", "down_proj"))


QWEN = Family(
    read_qwen,
    load_qwen_layer,
    norm_offset=NORM_OFFSET,
    skipped=("model.visual.", "visual."),
    load_mtp=load_qwen_mtp,
)
