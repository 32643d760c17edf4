"""Model configs: one description of a hybrid decoder for all families, read from a model folder's config.json.

A family's reader (headrace/models/families/) translates its own field names into these values; the layers are built
from them alone.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.cache.layout import CacheLayout


class ModelError(Exception):
    """A model folder cannot be served; the message names the file or field and the reason."""


class UnsupportedModel(ModelError):
    """The architecture, or one of its options, is not implemented."""


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with its options."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int = 0  # leading values of a head that rotate; 0 = no positional encoding
    rope_theta: float = 10000.0
    has_qk_norm: bool = False
    has_output_gate: bool = False


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
class GatedDeltaConfig:
    """A gated-delta-net mixer (Yang et al. 2025)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

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
class MoeConfig:
    """A mixture of experts beside a shared expert."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    router: Literal["top_k_then_softmax", "softmax_then_top_k"]
    renormalize: bool  # softmax_then_top_k only: the chosen weights sum to one
    has_shared_gate: bool  # the shared expert's output is scaled by a sigmoid


@dataclass(frozen=True)
class LayerConfig:
    """The kinds of one layer's mixer and feed-forward."""

    mixer: Literal["attention", "state"]
    feed_forward: Literal["dense", "moe"]


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
    state: Mamba2Config | GatedDeltaConfig
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        if any(layer.feed_forward == "moe" for layer in self.layers) and self.moe is None:
            raise ValueError("a layer is a mixture of experts, but moe is not set")
        if self.attention.num_heads % self.attention.num_kv_heads:
            raise ValueError(f"{self.attention.num_heads} heads over {self.attention.num_kv_heads} KV heads")

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.mixer == "attention" for layer in self.layers)

    @property
    def num_state_layers(self) -> int:
        return sum(layer.mixer == "state" for layer in self.layers)

    def mixer_index(self, layer: int) -> int:
        """The layer's place among the layers of its kind: in a block for attention, in a state otherwise."""
        return sum(other.mixer == self.layers[layer].mixer for other in self.layers[:layer])

    def canonical(self) -> str:
        """The same text for the same model: part of the fingerprint."""
        return json.dumps(asdict(self), sort_keys=True)

    def cache_layout(self, fingerprint: str, dtype: str, block_size: int, state_dtype: str = "float32") -> CacheLayout:
        return CacheLayout(
            fingerprint=fingerprint,
            dtype=dtype,
            state_dtype=state_dtype,
            block_size=block_size,
            num_attention_layers=self.num_attention_layers,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            conv_shape=(self.num_state_layers, self.state.conv_channels, self.state.conv_taps - 1),
            rec_shape=(self.num_state_layers, *self.state.state_shape),
        )


@dataclass(frozen=True)
class RawConfig:
    """config.json with the text model's fields in front, and the stop tokens beside them."""

    architecture: str
    text: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> "RawConfig":
        raw = _read_json(path / "config.json")
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise UnsupportedModel(f"{path}/config.json names architectures {architectures}, not one")
        text = {**raw, **raw.get("text_config", {})}
        if "tie_word_embeddings" in raw:  # the wrapper decides: it owns the head
            text["tie_word_embeddings"] = raw["tie_word_embeddings"]
        generation = path / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls(architectures[0], text, _as_ids(eos if eos is not None else text.get("eos_token_id")))

    def __getitem__(self, name: str) -> Any:
        if name not in self.text:
            raise ModelError(f"config.json of {self.architecture} has no {name!r}")
        return self.text[name]

    def get(self, name: str, default: Any) -> Any:
        """The field, or `default` if the file leaves it out or has null."""
        value = self.text.get(name)
        return default if value is None else value

    def require(self, name: str, *supported: Any) -> None:
        """Raises UnsupportedModel if the option is set to a value that is not implemented."""
        if self.get(name, supported[0]) not in supported:
            only = " or ".join(map(repr, supported))
            raise UnsupportedModel(f"{self.architecture} with {name}={self.text[name]!r}: only {only} is supported")

    def layer_mixers(self) -> list[Literal["attention", "state"]] | None:
        """One mixer for each layer; None if the file has no list. Local and hub files use different words."""
        words: dict[str, Literal["attention", "state"]] = {
            "attention": "attention",
            "full_attention": "attention",
            "mamba": "state",
            "linear_attention": "state",
        }
        listed = self.get("layer_types", self.get("layers_block_type", None))
        if listed is None:
            return None
        unknown = sorted(set(listed) - set(words))
        if unknown:
            raise UnsupportedModel(f"{self.architecture} with layer types {unknown}: only {sorted(words)}")
        return [words[word] for word in listed]

    def rope_theta(self) -> float:
        """The rotary base, under either generation of field names; only plain rotary embeddings are supported."""
        parameters = self._rope_parameters()
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "mrope"):  # on text alone, mrope is plain
            raise UnsupportedModel(f"{self.architecture} with rope type {kind!r}: only plain rotary embeddings")
        return float(parameters.get("rope_theta", self.get("rope_theta", 10000.0)))

    def partial_rotary_factor(self, default: float) -> float:
        """The share of a head that rotates."""
        outer = self.get("partial_rotary_factor", default)
        return float(self._rope_parameters().get("partial_rotary_factor", outer))

    def _rope_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.get("rope_parameters", self.get("rope_scaling", {}))
        return parameters


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return content


def _as_ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
