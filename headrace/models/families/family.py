"""A family of models: how its config is read, and under which names its tensors are found."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.models.config import ModelConfig, RawConfig
from headrace.models.model import DecoderLayer
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class Family:
    read_config: Callable[[RawConfig], ModelConfig]
    load_layer: Callable[[WeightSource, str, ModelConfig, int], DecoderLayer]  # weights, "…layers.3", config, 3
    final_norm: str = "norm"
    norm_offset: float = 0.0  # added to the stored weights of the final norm
    skipped: tuple[str, ...] = ()  # prefixes of parts that the engine does not run
