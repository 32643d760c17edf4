"""A model folder's config.json as the families read it: every field is checked for its type and range when it is read.

Errors name the field, its value and what it must be; `headrace.models.weights` puts the file before them.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

Mixer: TypeAlias = Literal["attention", "state"]

LARGEST_COUNT = 1 << 24
"""A larger size is a mistake: today's largest are vocabularies of 2^18 and contexts of 2^20 to 2^23 tokens."""
MOST_LAYERS = 4096
MIXERS: dict[str, Mixer] = {  # local and hub files use different words
    "attention": "attention",
    "conv": "state",
    "full_attention": "attention",
    "mamba": "state",
    "linear_attention": "state",
}


@dataclass(frozen=True)
class RawConfig:
    """config.json with the text model's fields in front, and the stop tokens beside them. null is a missing field."""

    architecture: str
    text: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> "RawConfig":
        """Raises ModelError with the file's path."""
        file = folder / "config.json"
        raw = read_json_object(file)
        architectures = raw.get("architectures")
        if not (isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)):
            raise UnsupportedModel(f"{file}: architectures {shown(architectures)}: must be a list of one name")
        inner = raw.get("text_config") or {}
        if not isinstance(inner, dict):
            raise ModelError(f"{file}: text_config {shown(inner)}: must be an object")
        text = {**raw, **inner}
        if "tie_word_embeddings" in raw:  # the wrapper decides: it owns the head
            text["tie_word_embeddings"] = raw["tie_word_embeddings"]
        modelopt = folder / "hf_quant_config.json"  # where the config itself may say nothing
        if text.get("quantization_config") is None and modelopt.exists():
            text["quantization_config"] = read_json_object(modelopt)
        generation = folder / "generation_config.json"
        eos = read_json_object(generation).get("eos_token_id") if generation.exists() else None
        if eos is not None:
            return cls(architectures[0], text, _token_ids(eos, generation))
        return cls(architectures[0], text, _token_ids(text.get("eos_token_id"), file))

    # ------------------------------------------------------------ one field

    def get(self, name: str, default: Any) -> Any:
        """The field as it is, or `default` if the file leaves it out or has null."""
        value = self.text.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT) -> int:
        """A whole number; `default` None: required."""
        value = self._given(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ModelError(f"{name} {shown(value)}: must be a whole number in {least}..{most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` None: required."""
        return _positive(name, self._given(name, default))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{name} {shown(value)}: must be true or false")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many finite numbers above 0; ones if the field is missing."""
        values = self.get(name, [1.0] * count)
        if not isinstance(values, list) or len(values) != count:
            raise ModelError(f"{name} {shown(values)}: must be a list of {count} numbers")
        return tuple(_positive(name, value) for value in values)

    def layer_numbers(self, name: str) -> frozenset[int]:
        """Layers by number, from 0; none if the field is missing."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise ModelError(f"{name} {shown(value)}: must be a list of layer numbers")
        return frozenset(value)

    def limits(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers, from 0 on. transformers writes an infinite one as {"__float__": "Infinity"}."""
        given = self.get(name, default)
        try:
            least, most = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in given)
        except (TypeError, ValueError, KeyError) as error:
            raise ModelError(f"{name} {shown(given)}: must be two numbers") from error
        if not 0 <= least < most:
            raise ModelError(f"{name} {shown(given)}: must be two numbers, the smaller one first")
        return least, most

    def require(self, name: str, *supported: Any) -> None:
        """Raises UnsupportedModel if the option is set to a value that is not implemented."""
        value = self.get(name, supported[0])
        if value not in supported:
            only = " or ".join(map(repr, supported))
            raise UnsupportedModel(f"{self.architecture} with {name}={shown(value)}: only {only} is supported")

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"no {name!r}, which {self.architecture} needs: give a complete checkpoint's folder")
        return value

    # ------------------------------------------------------------ layers

    def mixers(self, of_layer: Callable[[int], Mixer]) -> list[Mixer]:
        """One mixer for each layer: as listed, or `of_layer` of each number where the file has no list."""
        num_layers = self.count("num_hidden_layers", most=MOST_LAYERS)
        name = next((name for name in ("layer_types", "layers_block_type") if self.get(name, None) is not None), None)
        if name is None:
            return [of_layer(layer) for layer in range(num_layers)]
        listed = self.text[name]
        if not isinstance(listed, list):
            raise ModelError(f"{name} {shown(listed)}: must be a list of {num_layers} layer types")
        unknown = [word for word in listed if not isinstance(word, str) or word not in MIXERS]
        if unknown:
            raise UnsupportedModel(
                f"{self.architecture} with {name} {shown(unknown[0])}: only {', '.join(MIXERS)} are supported"
            )
        if len(listed) != num_layers:
            raise ModelError(f"num_hidden_layers {num_layers} beside {len(listed)} {name}: they must agree")
        return [MIXERS[word] for word in listed]

    # ------------------------------------------------------------ rotary embeddings

    def rope_theta(self, default: float = 10000.0) -> float:
        """The rotary base, under either generation of field names."""
        inner = self._rope_parameters().get("rope_theta")
        return _positive("rope_theta", self.get("rope_theta", default) if inner is None else inner)

    def has_rotary_embedding(self) -> bool:
        """False if a config that may do without says so, by a base that is null."""
        parameters = self._rope_parameters()
        return "rope_theta" not in parameters or parameters["rope_theta"] is not None

    def rope_scaling(self) -> RopeScaling | None:
        """How rotary frequencies are stretched for contexts longer than the trained one; None: they are plain."""
        kind = self._rope_kind()
        if kind in ("default", "mrope"):  # on text alone, mrope is plain
            return None
        if kind not in ("linear", "llama3", "yarn"):
            kinds = "default, linear, llama3, mrope, yarn"
            raise UnsupportedModel(f"{self.architecture} with rope type {shown(kind)}: only {kinds} are supported")
        factor = self._rope_factor()
        if kind == "linear":
            return LinearScaling(factor)
        if kind == "yarn":
            return self._yarn_scaling(factor)
        low, high = self._rope_number("low_freq_factor", None), self._rope_number("high_freq_factor", None)
        if low >= high:
            raise ModelError(f"low_freq_factor {low}: must be below high_freq_factor {high}")
        return Llama3Scaling(factor, self._trained_tokens(), low, high)

    def max_position(self) -> int:
        """The longest context in tokens. A config that asks for YaRN gives the trained one, which it multiplies."""
        given = self.count("max_position_embeddings")
        if self._rope_kind() != "yarn":
            return given
        return max(given, int(self._trained_tokens() * self._rope_factor()))

    def _yarn_scaling(self, factor: float) -> YarnScaling:
        parameters = self._rope_parameters()
        scales = [parameters.get(name) and self._rope_number(name, None) for name in ("mscale", "mscale_all_dim")]
        truncate = parameters.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ModelError(f"truncate {shown(truncate)}: must be true or false")
        return YarnScaling(
            factor,
            self._trained_tokens(),
            self._rope_number("attention_factor", yarn_attention_factor(factor, *scales)),
            self._rope_number("beta_fast", 32.0),
            self._rope_number("beta_slow", 1.0),
            truncate,
        )

    def _rope_kind(self) -> Any:
        parameters = self._rope_parameters()
        return parameters.get("rope_type", parameters.get("type", "default"))

    def _rope_factor(self) -> float:
        """How many times longer the context is than the trained one."""
        given = self.count("max_position_embeddings") / self._trained_tokens() if self._rope_kind() == "yarn" else None
        return self._rope_number("factor", given)

    def _trained_tokens(self) -> float:
        """The context that the model was trained for; beside the rotary parameters it goes before one among them."""
        name = "original_max_position_embeddings"
        if self.get(name, None) is not None:
            return self.number(name)
        return self._rope_number(name, self.count("max_position_embeddings"))

    def _rope_number(self, name: str, default: float | None) -> float:
        """A number among the rotary parameters; `default` None: required."""
        value = self._rope_parameters().get(name)
        return _positive(f"rope_parameters.{name}", default if value is None else value)

    def partial_rotary_factor(self, default: float) -> float:
        """The share of a head that rotates."""
        outer = self.get("partial_rotary_factor", default)
        share = _positive("partial_rotary_factor", self._rope_parameters().get("partial_rotary_factor", outer))
        if share > 1:
            raise ModelError(f"partial_rotary_factor {share}: must be at most 1")
        return share

    def _rope_parameters(self) -> Mapping[str, Any]:
        """Under the name of the generation; of both, the older one counts, as in transformers."""
        parameters = self.get("rope_scaling", None) or self.get("rope_parameters", {})
        if not isinstance(parameters, dict):
            raise ModelError(f"rope_parameters {shown(parameters)}: must be an object")
        nested = [name for name, value in parameters.items() if isinstance(value, dict)]
        if nested:
            raise UnsupportedModel(
                f"{self.architecture} with rope_parameters of their own for {shown(nested[0])}: only the same for all "
                "layers are supported"
            )
        return parameters


def even_share(size: int, size_name: str, heads: int, heads_name: str) -> int:
    """Share of a size that each head gets. Raises ModelError if it does not divide evenly."""
    if size % heads:
        raise ModelError(f"{size_name} {size} over {heads_name} {heads}: must divide evenly")
    return size // heads


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError with the file's path."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; give a model folder that this user can read") from error
    except (ValueError, RecursionError) as error:  # ValueError: also what is not UTF-8
        raise ModelError(f"{file}: not JSON: {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: {shown(content)}: must be a JSON object")
    return content


def shown(value: object, limit: int = 60) -> str:
    """A value in a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _positive(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{name} {shown(value)}: must be a finite number above 0")
    return float(value)


def _token_ids(eos: object, file: Path) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ModelError(f"{file}: eos_token_id {shown(eos)}: must be a token id or a list of them")
    return tuple(ids)
