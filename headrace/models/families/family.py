"""What a family of checkpoints must say about itself: how to read its config, and where its tensors are."""

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
    norm_offset: float = 0.0  # added to stored norm weights
    skipped: tuple[str, ...] = ()  # prefixes of parts that the engine does not run
