"""Nemotron-H and Nemotron 3 (Nano, Super): one branch a layer, which is Mamba2, attention without positional encoding,
a feed-forward without a gate, or a mixture of such experts, in Super between two projections to a smaller space.

Super's layer for multi-token prediction (headrace/models/mtp.py) is one of attention and one of experts. transformers
drops it: names and order of its tensors are those of vLLM, vllm/model_executor/models/nemotron_h_mtp.py.

transformers 5.23 raises time steps of prompts to `time_step_min`, and leaves those of single tokens. So a state depends
on how it was computed; here `time_step_limit` alone bounds them.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.moe.experts import experts_of
from headrace.models.branches import Branch, BranchChain, FeedForwardBranch, MixerBranch
from headrace.models.config import (
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    ModelError,
    MoeConfig,
    UnsupportedModel,
)
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import Latent, MixtureOfExperts, ReluSquared, SigmoidRouter
from headrace.models.layers.mamba2 import Mamba2
from headrace.models.model import Family
from headrace.models.mtp import MtpLayer
from headrace.models.raw_config import MOST_LAYERS, RawConfig, shown
from headrace.models.weight_files import WeightSource

STATE, ATTENTION = LayerConfig("state", None), LayerConfig("attention", None)
DENSE, MOE = LayerConfig(None, "dense"), LayerConfig(None, "moe")
LAYERS = {  # as local files name them, hub files, and patterns of one letter a layer
    "linear_attention": STATE,
    "full_attention": ATTENTION,
    "mlp": DENSE,
    "moe": MOE,
    "mamba": STATE,
    "attention": ATTENTION,
    "M": STATE,
    "*": ATTENTION,
    "-": DENSE,
    "E": MOE,
}


def read_nemotron_h(raw: RawConfig) -> ModelConfig:
    raw.require("mlp_hidden_act", "relu2")
    raw.require("mamba_hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        raw.require(name, False)
    for name in ("sliding_window", "mamba_dt_limit", "mamba_conv_bias", "mamba_d_conv", "mamba_n_groups"):
        raw.require(name, None)  # the last four: other names that transformers reads before the usual ones
    layers = read_layers(raw)
    moe = _read_moe(raw) if MOE in layers else None
    head_dim = raw.count("head_dim" if raw.get("head_dim", None) is not None else "attention_head_dim", 128)
    dt_min, dt_max = raw.limits("time_step_limit", (0.0, float("inf")))
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.count("max_position_embeddings"),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size", 0 if DENSE not in layers else None, least=0),
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=layers,
        attention=AttentionConfig(
            num_heads=raw.count("num_attention_heads"),
            num_kv_heads=raw.count("num_key_value_heads", raw.count("num_attention_heads")),
            head_dim=head_dim,
            scale=head_dim**-0.5,
        ),
        state=Mamba2Config(
            num_heads=raw.count("mamba_num_heads"),
            head_dim=raw.count("mamba_head_dim"),
            state_size=raw.count("ssm_state_size"),
            num_groups=raw.count("n_groups"),
            conv_taps=raw.count("conv_kernel", 4, least=2),
            has_conv_bias=raw.flag("use_conv_bias", True),
            dt_min=dt_min,
            dt_max=dt_max,
        ),
        moe=moe,
        eos_token_ids=raw.eos_token_ids,
        activation="relu_squared",
    )


def read_layers(raw: RawConfig) -> tuple[LayerConfig, ...]:
    """The kind of each layer, from a list of words or from a pattern such as "M*-E"."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    name = next((name for name in names if raw.get(name, None) is not None), names[-1])
    listed: Any = raw.get(name, None)
    if not isinstance(listed, list | str) or not 0 < len(listed) <= MOST_LAYERS:
        raise ModelError(f"{name} {shown(listed)}: must name the kind of each layer")
    unknown = [word for word in listed if not isinstance(word, str) or word not in LAYERS]
    if unknown:
        raise UnsupportedModel(
            f"{raw.architecture} with {name} {shown(unknown[0])}: only {', '.join(LAYERS)} are supported"
        )
    num_layers = raw.count("num_hidden_layers", len(listed))
    if len(listed) != num_layers:
        raise ModelError(f"num_hidden_layers {num_layers} beside {len(listed)} of {name}: they must agree")
    return tuple(LAYERS[word] for word in listed)


def _read_moe(raw: RawConfig) -> MoeConfig:
    raw.require("n_shared_experts", 1)
    return MoeConfig(
        num_experts=raw.count("n_routed_experts"),
        experts_per_token=raw.count("num_experts_per_tok"),
        intermediate_size=raw.count("moe_intermediate_size"),
        shared_intermediate_size=raw.count("moe_shared_expert_intermediate_size"),
        router="sigmoid",
        renormalize=raw.flag("norm_topk_prob", True),
        has_shared_gate=False,
        num_groups=raw.count("n_group", 1),
        chosen_groups=raw.count("topk_group", 1),
        scale=raw.number("routed_scaling_factor", 1.0),
        latent_size=None if raw.get("moe_latent_size", None) is None else raw.count("moe_latent_size"),
    )


def load_nemotron_h_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden, mixer = config.hidden_size, f"{prefix}.mixer"
    kind, index, eps = config.layers[layer], config.mixer_index(layer), config.norm_eps
    if kind.mixer is None:
        return (_load_feed_forward(weights, prefix, config, has_experts=kind == MOE),)
    norm = _load_norm(weights, f"{prefix}.norm", hidden)
    if kind == ATTENTION:
        return (MixerBranch(Attention.load(weights, mixer, config.attention, index, hidden, eps), norm),)
    assert isinstance(config.state, Mamba2Config)
    return (MixerBranch(Mamba2.load(weights, mixer, config.state, index, hidden, eps), norm),)


def load_nemotron_h_mtp(weights: WeightSource, config: ModelConfig) -> MtpLayer:
    """From `mtp.*`: one attention layer, and one of experts if the model has them, otherwise a dense feed-forward.

    Raises ModelError for a checkpoint without them; other layers are left over, and the loader refuses them by name.
    """
    hidden, eps, (first, last) = config.hidden_size, config.norm_eps, ("mtp.layers.0", "mtp.layers.1")
    index = config.num_attention_layers  # in a block, behind the model's own
    attention = Attention.load(weights, f"{first}.mixer", config.attention, index, hidden, eps)
    return MtpLayer(
        embedding_norm=_load_norm(weights, f"{first}.enorm", hidden),
        hidden_norm=_load_norm(weights, f"{first}.hnorm", hidden),
        fc=LinearWeight(weights.take(f"{first}.eh_proj.weight", (hidden, 2 * hidden))),
        chain=BranchChain(
            (
                MixerBranch(attention.of_mtp(), _load_norm(weights, f"{first}.norm", hidden)),
                _load_feed_forward(weights, last, config, has_experts=config.moe is not None),
            ),
            _load_norm(weights, f"{last}.final_layernorm", hidden),
            eps,
            config.residual_multiplier,
        ),
    )


def _load_norm(weights: WeightSource, name: str, hidden: int) -> Tensor:
    return weights.take(f"{name}.weight", (hidden,), torch.float32)


def _load_feed_forward(
    weights: WeightSource, prefix: str, config: ModelConfig, *, has_experts: bool
) -> FeedForwardBranch:
    hidden, mixer = config.hidden_size, f"{prefix}.mixer"
    norm = _load_norm(weights, f"{prefix}.norm", hidden)
    if has_experts:
        return FeedForwardBranch(_load_moe(weights, mixer, config), norm)
    return FeedForwardBranch(ReluSquared.load(weights, mixer, hidden, config.intermediate_size), norm)


def _load_moe(weights: WeightSource, prefix: str, config: ModelConfig) -> MixtureOfExperts:
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    num, inner, size = moe.num_experts, moe.intermediate_size, moe.latent_size or hidden
    matrix = weights.take(f"{prefix}.gate.weight", (num, hidden), torch.float32)
    bias = weights.take(f"{prefix}.gate.e_score_correction_bias", (num,), torch.float32)
    latent = None
    if moe.latent_size is not None:
        latent = Latent(
            LinearWeight(weights.matrix(f"{prefix}.fc1_latent_proj.weight", (size, hidden))),
            LinearWeight(weights.matrix(f"{prefix}.fc2_latent_proj.weight", (hidden, size))),
        )
    experts = [f"{prefix}.experts.{e}" for e in range(num)]
    return MixtureOfExperts(
        router=SigmoidRouter.of(moe, matrix, bias),
        up=experts_of(stack_rows([weights.matrix(f"{e}.up_proj.weight", (inner, size)) for e in experts]), num),
        down=experts_of(stack_rows([weights.matrix(f"{e}.down_proj.weight", (size, inner)) for e in experts]), num),
        shared=ReluSquared.load(weights, f"{prefix}.shared_experts", hidden, moe.shared_intermediate_size),
        latent=latent,
    )


NEMOTRON_H = Family(
    read_nemotron_h,
    load_nemotron_h_layer,
    embedding="embeddings",
    final_norm="norm_f",
    skipped=("model.mtp.",),
    load_mtp=load_nemotron_h_mtp,
)
