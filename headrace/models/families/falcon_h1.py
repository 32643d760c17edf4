"""Falcon-H1: Mamba2 and attention beside each other in every layer, with muP's factors on all that they read and write.

The factors are put into the weights while these are loaded: running costs nothing more.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import Matrix
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.moe.experts import Experts
from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import (
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    ModelError,
    Multipliers,
    UnsupportedModel,
)
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import SwiGlu
from headrace.models.layers.mamba2 import Mamba2
from headrace.models.layers.parallel_mixers import ParallelMixers
from headrace.models.model import Family
from headrace.models.raw_config import MOST_LAYERS, RawConfig
from headrace.models.weight_files import WeightSource

ROPE_THETA = 1e11  # where the file names none


def read_falcon_h1(raw: RawConfig) -> ModelConfig:
    raw.require("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        raw.require(name, False)
    has_norm = raw.flag("mamba_rms_norm", False)
    if has_norm and raw.flag("mamba_norm_before_gate", True):
        raise UnsupportedModel(
            f"{raw.architecture} with mamba_norm_before_gate, which is true where the file leaves it out: "
            "only false is supported beside mamba_rms_norm"
        )
    num_heads = raw.count("num_attention_heads")
    head_dim = raw.count("head_dim", max(raw.count("hidden_size") // num_heads, 1))
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.max_position(),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps"),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=(LayerConfig("both", "dense"),) * raw.count("num_hidden_layers", most=MOST_LAYERS),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=raw.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary_dim=head_dim,
            rope_theta=raw.rope_theta(ROPE_THETA),
            rope_scaling=raw.rope_scaling(),
        ),
        state=_read_state(raw, has_norm),
        moe=None,
        eos_token_ids=raw.eos_token_ids,
        embedding_multiplier=raw.number("embedding_multiplier", 1.0),
        logits_divisor=1.0 / raw.number("lm_head_multiplier", 1.0),
        multipliers=_read_multipliers(raw),
    )


def _read_state(raw: RawConfig, has_norm: bool) -> Mamba2Config:
    num_heads = raw.count("mamba_n_heads")
    inner = raw.count("mamba_d_ssm", raw.count("mamba_expand", 2) * raw.count("hidden_size"))
    head_dim = inner // num_heads if raw.get("mamba_d_head", "auto") == "auto" else raw.count("mamba_d_head")
    if head_dim * num_heads != inner:
        raise ModelError(f"mamba_n_heads {num_heads} of {head_dim} values: must be the {inner} of mamba_d_ssm")
    dt_min, dt_max = raw.limits("time_step_limit", (0.0, float("inf")))
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=raw.count("mamba_d_state"),
        num_groups=raw.count("mamba_n_groups"),
        conv_taps=raw.count("mamba_d_conv", least=2),
        has_conv_bias=raw.flag("mamba_conv_bias", True),
        dt_min=dt_min,
        dt_max=dt_max,
        has_norm=has_norm,
    )


def _read_multipliers(raw: RawConfig) -> Multipliers:
    gate, out = raw.numbers("mlp_multipliers", 2)
    return Multipliers(
        attention_in=raw.number("attention_in_multiplier", 1.0),
        key=raw.number("key_multiplier", 1.0),
        attention_out=raw.number("attention_out_multiplier", 1.0),
        state_in=raw.number("ssm_in_multiplier", 1.0),
        state=raw.numbers("ssm_multipliers", 5),
        state_out=raw.number("ssm_out_multiplier", 1.0),
        feed_forward_gate=gate,
        feed_forward_out=out,
    )


def load_falcon_h1_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    assert isinstance(config.state, Mamba2Config)
    hidden, eps, state, attention = config.hidden_size, config.norm_eps, config.state, config.attention
    scaled = _ScaledWeights(weights, _factors(config.multipliers or Multipliers(), state))
    index, attended = config.mixer_index(layer), attention.num_heads * attention.head_dim
    from_state = scaled.take(f"{prefix}.mamba.out_proj.weight", (hidden, state.inner_size))
    from_attention = scaled.take(f"{prefix}.self_attn.o_proj.weight", (hidden, attended))
    joint = LinearWeight(torch.cat((from_state, from_attention), dim=1))
    mamba = Mamba2.load(scaled, f"{prefix}.mamba", state, index, hidden, eps, joint)
    attend = Attention.load(scaled, f"{prefix}.self_attn", attention, index, hidden, eps, out_proj=joint)
    return (
        MixerBranch(
            ParallelMixers(mamba, attend, joint),
            weights.take(f"{prefix}.input_layernorm.weight", (hidden,), torch.float32),
        ),
        FeedForwardBranch(
            SwiGlu.load(scaled, f"{prefix}.feed_forward", hidden, config.intermediate_size),
            weights.take(f"{prefix}.pre_ff_layernorm.weight", (hidden,), torch.float32),
        ),
    )


def _factors(by: Multipliers, state: Mamba2Config) -> dict[str, float | Tensor]:
    """Factors of a layer's matrices by name: a number, or a column with one for each row."""
    shared = state.num_groups * state.state_size
    rows = torch.tensor([state.inner_size, state.inner_size, shared, shared, state.num_heads])
    projected = torch.tensor(by.state).mul(by.state_in).repeat_interleave(rows)
    return {
        "mamba.in_proj": projected[:, None],
        "mamba.out_proj": by.state_out,
        "self_attn.q_proj": by.attention_in,
        "self_attn.k_proj": by.attention_in * by.key,
        "self_attn.v_proj": by.attention_in,
        "self_attn.o_proj": by.attention_out,
        "feed_forward.gate_proj": by.feed_forward_gate,
        "feed_forward.down_proj": by.feed_forward_out,
    }


@dataclass(frozen=True)
class _ScaledWeights:
    """Weights, those named in `factors` multiplied by them: in float32, then rounded to the model's dtype."""

    weights: WeightSource
    factors: Mapping[str, float | Tensor]

    @property
    def remaining(self) -> Set[str]:
        return self.weights.remaining

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        weight, factor = self.weights.take(name, shape, dtype), self._factor(name)
        return weight if factor is None else (weight.float() * factor.to(weight.device)).to(weight.dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        matrix, factor = self.weights.matrix(name, shape), self._factor(name)
        if factor is None:
            return matrix
        if isinstance(matrix, Tensor):
            return (matrix.float() * factor.to(matrix.device)).to(matrix.dtype)
        by_row = matrix.by_row()
        return replace(by_row, scales=by_row.scales * factor.to(by_row.scales.device))

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        return self.weights.experts(name, shape)  # no factor is one of experts

    def _factor(self, name: str) -> Tensor | None:
        factor = self.factors.get(".".join(name.split(".")[-3:-1]))
        return None if factor is None else torch.as_tensor(factor)

    def skip(self, *prefixes: str) -> None:
        self.weights.skip(*prefixes)

    def assert_all_taken(self) -> None:
        self.weights.assert_all_taken()


FALCON_H1 = Family(read_falcon_h1, load_falcon_h1_layer, final_norm="final_layernorm")
