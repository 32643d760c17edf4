"""Random weights for a model shape without files, scaled so that activations stay in a normal range. For benchmarks."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from blake3 import blake3
from torch import Tensor

SEED = 0
DT_MIN, DT_MAX = 1e-3, 1e-1  # Mamba2's steps at initialisation (Dao & Gu 2024): the state forgets, but slowly
A_MAX = 16.0


class RandomWeights:
    """A stand-in for `WeightFiles`: every name has a tensor, drawn on the device from the name and the seed alone.

    Rows of matrices have length about one, so that activations keep their size from layer to layer; the parameters of
    a state's decay are drawn as its authors initialise them. Routers prefer no expert: as in trained models, whose
    biases even them out, tokens choose nearly all of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = SEED):
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self.remaining: Set[str] = frozenset()  # no name is listed: loaders then take the plainest layout

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """As `WeightFiles.take`, for any name."""
        generator = torch.Generator(self._device).manual_seed(_seed_of(f"{self._seed}/{name}"))
        weight = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        match name.rsplit(".", 2)[-2:]:
            case [*_, "A_log"]:
                return weight.uniform_(1.0, A_MAX, generator=generator).log_()
            case [*_, "dt_bias"] | ["dt_proj", "bias"]:
                dt = weight.uniform_(math.log(DT_MIN), math.log(DT_MAX), generator=generator).exp_()
                return torch.log(torch.expm1(dt))  # softplus gives it back
            case [*_, "D"]:
                return weight.fill_(1.0)
            case [*_, "e_score_correction_bias" | "expert_bias"]:  # random ones would decide for most tokens
                return weight.zero_()
            case [layer, "weight"] if "norm" in layer:
                return weight.fill_(1.0)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        """As `take`."""
        return self.take(name, shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """As `take`."""
        return self.take(name, shape)

    def skip(self, *prefixes: str) -> None:
        """Does nothing: no tensor is ever left over."""

    def assert_all_taken(self) -> None:
        """Does nothing: no tensor is ever left over."""


def random_fingerprint(config: str, device: torch.device, seed: int = SEED) -> str:
    """The fingerprint of random weights; it names the device type, whose random numbers are its own."""
    return blake3(f"dummy/{seed}/{device.type}/{config}".encode()).hexdigest()


def _seed_of(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(length=7))
