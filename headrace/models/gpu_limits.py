"""Sizes that the GPU's kernels do not take: known from the config, before weights are read."""

from collections.abc import Iterator

from headrace.kernels.attention.head_dims import LARGEST_HEAD_DIM
from headrace.models.config import ModelConfig, UnsupportedModel

EXPERT_MULTIPLE = 16  # of an expert's sizes: rows of its matrices are read in wide loads

LEAST_LATENT_PART = 16  # values of a latent's parts: a matrix unit's depth


def check_gpu(config: ModelConfig) -> None:
    """Raises UnsupportedModel with the size, its limit and the remedy."""
    for fault in _faults(config):
        raise UnsupportedModel(f"{config.architecture} with {fault} on a GPU; serve it with device: cpu")


def _faults(config: ModelConfig) -> Iterator[str]:
    attention, moe = config.attention, config.moe
    if attention.latent is None and attention.head_dim > LARGEST_HEAD_DIM:
        yield f"attention heads of {attention.head_dim}: at most {LARGEST_HEAD_DIM} are supported"
    latent = attention.latent
    if latent is not None and not all(map(_is_wide_power_of_2, (latent.size, latent.shared_key_dim))):
        yield (
            f"latents of {latent.size} and {latent.shared_key_dim} values: only powers of two of at least "
            f"{LEAST_LATENT_PART} are supported"
        )
    if moe is None:
        return
    for name, size in (("inputs", moe.latent_size or config.hidden_size), ("inner size", moe.intermediate_size)):
        if size % EXPERT_MULTIPLE:
            yield f"experts' {name} of {size}: only multiples of {EXPERT_MULTIPLE} are supported"


def _is_wide_power_of_2(size: int) -> bool:
    return size >= LEAST_LATENT_PART and size & (size - 1) == 0
