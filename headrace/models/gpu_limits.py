"""Sizes that the GPU's kernels do not take: known from the config, before weights are read."""

from collections.abc import Iterator

from headrace.kernels.attention.head_dims import LARGEST_HEAD_DIM
from headrace.models.config import ModelConfig, UnsupportedModel

EXPERT_MULTIPLE = 16  # of an expert's sizes: rows of its matrices are read in wide loads


def check_gpu(config: ModelConfig) -> None:
    """Raises UnsupportedModel with the size, its limit and the remedy."""
    for fault in _faults(config):
        raise UnsupportedModel(f"{config.architecture} with {fault} on a GPU; serve it with device: cpu")


def _faults(config: ModelConfig) -> Iterator[str]:
    attention, moe = config.attention, config.moe
    if attention.latent is None and attention.head_dim > LARGEST_HEAD_DIM:
        yield f"attention heads of {attention.head_dim}: at most {LARGEST_HEAD_DIM} are supported"
    if moe is None:
        return
    for name, size in (("inputs", moe.latent_size or config.hidden_size), ("inner size", moe.intermediate_size)):
        if size % EXPERT_MULTIPLE:
            yield f"experts' {name} of {size}: only multiples of {EXPERT_MULTIPLE} are supported"
