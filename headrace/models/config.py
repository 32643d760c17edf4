"""Model configs: one description of a hybrid decoder for all families.

A family's reader (headrace/models/families/) translates its own field names in config.json
(headrace/models/raw_config.py) into these values; the layers are built from them alone.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.models.rope_scaling import RopeScaling


class ModelError(Exception):
    """A model folder cannot be served; the message names the file or field and the reason."""


class UnsupportedModel(ModelError):
    """The architecture, or one of its options, is not implemented."""


class NoMtpLayer(UnsupportedModel):
    """A model is to be loaded with its MTP layer, and has none."""


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024): one vector a token stands for the keys and values of all heads.

    Its first `size` values are what each head's own keys and values are projected from, the others the same part of
    every head's key.
    """

    size: int
    key_dim: int  # of a head's own part
    shared_key_dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with its options; latent attention is one KV head of `latent`'s vector."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int = 0  # leading values of a head that rotate; 0 = no positional encoding
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    has_qk_norm: bool = False
    has_row_norm: bool = False  # all queries of a token are normed together, and so are all keys
    has_output_gate: bool = False
    latent: LatentConfig | None = None

    def cache_group(self, num_layers: int) -> AttentionGroup:
        """The blocks' part of so many layers."""
        return AttentionGroup(num_layers, self.num_kv_heads, self.head_dim, num_planes=2 if self.latent is None else 1)


@dataclass(frozen=True)
class Mamba2Config:
    """A Mamba2 mixer (Dao & Gu 2024)."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_taps: int
    has_conv_bias: bool
    dt_min: float = 0.0
    dt_max: float = float("inf")
    has_norm: bool = True  # behind the gate

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size


@dataclass(frozen=True)
class Mamba1Config:
    """A Mamba1 mixer (Gu & Dao 2023), with norms of its time steps, B and C (Jamba)."""

    inner_size: int
    state_size: int
    dt_rank: int
    conv_taps: int
    has_conv_bias: bool

    @property
    def conv_channels(self) -> int:
        return self.inner_size

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.inner_size, self.state_size


@dataclass(frozen=True)
class GatedDeltaConfig:
    """A gated-delta-net mixer (Yang et al. 2025)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    beta_scale: float = 1.0  # 2: a key's part of the state may change its sign

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class KimiDeltaConfig:
    """A Kimi-delta-attention mixer (Kimi Team 2025): gated delta net whose decay is each key channel's own."""

    num_heads: int
    head_dim: int  # of keys and of values, and the rank of both gates' projections
    conv_taps: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return 3 * self.inner_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution (Liquid AI 2025, LFM2), of as many channels as the model is wide."""

    conv_channels: int
    conv_taps: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (0,)


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts beside a shared expert."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    router: Literal["top_k_then_softmax", "softmax_then_top_k", "sigmoid"]
    renormalize: bool  # not for top_k_then_softmax: the chosen weights sum to one
    has_shared_gate: bool  # the shared expert's output is scaled by a sigmoid
    num_groups: int = 1  # sigmoid only: experts fall into groups, and the best groups are chosen first
    chosen_groups: int = 1
    scale: float = 1.0  # sigmoid only: of the chosen weights
    has_bias: bool = True  # sigmoid only: added to scores when experts are chosen
    latent_size: int | None = None  # routed experts work in a space of this size, between two projections


@dataclass(frozen=True)
class Multipliers:
    """Falcon-H1's factors (muP, Yang et al. 2022) of inputs and outputs; loading puts them into the weights."""

    attention_in: float = 1.0
    key: float = 1.0
    attention_out: float = 1.0
    state_in: float = 1.0
    state: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # of the projected gate, x, B, C and dt
    state_out: float = 1.0
    feed_forward_gate: float = 1.0
    feed_forward_out: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """The kinds of one layer's mixer and feed-forward; a layer may have one of them alone."""

    mixer: Literal["attention", "state", "both"] | None
    feed_forward: Literal["dense", "moe"] | None


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid decoder; all its attention layers are alike, and so are its state layers."""

    architecture: str
    vocab_size: int
    max_position: int
    hidden_size: int
    intermediate_size: int  # of dense feed-forwards
    norm_eps: float
    tied_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    state: Mamba1Config | Mamba2Config | GatedDeltaConfig | KimiDeltaConfig | ShortConvConfig
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    activation: Literal["swiglu", "relu_squared"] = "swiglu"  # of feed-forwards and experts; the second has no gate
    logits_divisor: float = 1.0
    multipliers: Multipliers | None = None

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ModelError(fault)

    def _faults(self) -> Iterator[str]:
        """Sizes that do not go together."""
        if not self.num_attention_layers or not self.num_state_layers:
            yield (
                f"{self.num_attention_layers} attention and {self.num_state_layers} state layers: only hybrids are "
                "supported, which have both"
            )
        if "both" in (mixers := {layer.mixer for layer in self.layers}) and len(mixers) > 1:
            yield "layers with both mixers beside layers without: not supported, since all of them must be alike"
        attention, state, moe = self.attention, self.state, self.moe
        if attention.num_heads % attention.num_kv_heads:
            yield f"{attention.num_heads} attention heads over {attention.num_kv_heads} KV heads: must divide evenly"
        if attention.rotary_dim % 2 or attention.rotary_dim > attention.head_dim:
            yield f"{attention.rotary_dim} of a head's {attention.head_dim} values rotate: must be an even number"
        if isinstance(state, Mamba2Config) and state.num_heads % state.num_groups:
            yield f"{state.num_heads} state heads over {state.num_groups} groups: must divide evenly"
        if isinstance(state, GatedDeltaConfig) and state.num_value_heads % state.num_key_heads:
            yield f"{state.num_value_heads} value heads over {state.num_key_heads} key heads: must divide evenly"
        kinds = {layer.feed_forward for layer in self.layers}
        if "moe" in kinds and moe is None:
            yield "a layer is a mixture of experts, and no experts are described"
        if "dense" in kinds and self.intermediate_size < 1:
            yield "a layer's feed-forward is dense, and intermediate_size is missing"
        if moe is not None and moe.experts_per_token > moe.num_experts:
            yield f"{moe.experts_per_token} of {moe.num_experts} experts a token: there are not so many"
        if moe is not None and moe.num_groups > 1:
            yield from _group_faults(moe)

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.mixer in ("attention", "both") for layer in self.layers)

    @property
    def num_state_layers(self) -> int:
        return sum(layer.mixer in ("state", "both") for layer in self.layers)

    def mixer_index(self, layer: int) -> int:
        """The layer's place among the layers of its kind: in a block, in a state, or in both."""
        return sum(other.mixer == self.layers[layer].mixer for other in self.layers[:layer])

    @property
    def up_matrices(self) -> int:
        """Matrices of a feed-forward, or of an expert, before the activation: gate and up, or up alone."""
        return 2 if self.activation == "swiglu" else 1

    def canonical(self) -> str:
        """The same text for the same model: part of the fingerprint."""
        return json.dumps(asdict(self), sort_keys=True)

    def cache_layout(self, fingerprint: str, dtype: str, block_size: int, state_dtype: str = "float32") -> CacheLayout:
        return CacheLayout(
            fingerprint=fingerprint,
            dtype=dtype,
            state_dtype=state_dtype,
            block_size=block_size,
            attention_groups=(self.attention.cache_group(self.num_attention_layers),),
            state_groups=(
                StateGroup(
                    self.num_state_layers,
                    conv_shape=(self.state.conv_channels, self.state.conv_taps - 1),
                    rec_shape=self.state.state_shape,
                ),
            ),
        )


def _group_faults(moe: MoeConfig) -> Iterator[str]:
    if moe.num_experts % moe.num_groups or moe.num_experts // moe.num_groups < 2:
        yield f"{moe.num_experts} experts in {moe.num_groups} groups: must divide evenly, into two or more each"
    if not 0 < moe.chosen_groups <= moe.num_groups:
        yield f"{moe.chosen_groups} of {moe.num_groups} groups of experts a token: there are not so many"
    elif moe.experts_per_token > moe.num_experts // moe.num_groups * moe.chosen_groups:
        yield f"{moe.experts_per_token} experts a token from {moe.chosen_groups} groups: these do not have so many"
