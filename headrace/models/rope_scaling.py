"""Rotary frequencies of contexts longer than the trained one: how a config stretches them, and by how much.

    linear    every frequency / factor
    llama3    frequencies / factor where a wave is longer than the trained context, as they are where it is short, a
              blend between
    yarn      the same with a ramp over the dimensions; cos and sin are multiplied by an attention factor

Numerics  as transformers', in float32
Source    Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models"; Dubey et al. 2024, "The
          Llama 3 Herd of Models"
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """All positions are pressed together."""

    factor: float
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """The frequencies [R] of the longer context, from the plain ones to the base `theta`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Waves longer than the trained context are stretched."""

    factor: float
    trained_tokens: float
    low_freq_factor: float
    high_freq_factor: float
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """As `LinearScaling.stretch`."""
        turns = self.trained_tokens * frequencies / (2 * math.pi)  # within the trained context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, share.clamp(0, 1))


@dataclass(frozen=True)
class YarnScaling:
    """Dimensions that turn less than `beta_slow` times in the trained context are stretched, those that turn more than
    `beta_fast` times are not."""

    factor: float
    trained_tokens: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # the ramp begins and ends at whole dimensions

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """As `LinearScaling.stretch`."""
        rotary_dim = 2 * len(frequencies)
        first, last = (self._dimension(turns, rotary_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        if first == last:
            last += 0.001
        dimension = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        kept = 1 - ((dimension - first) / (last - first)).clamp(0, 1)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _dimension(self, turns: float, rotary_dim: int, theta: float) -> float:
        """The dimension that turns so often in the trained context."""
        return rotary_dim * math.log(self.trained_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor of cos and sin where the config gives none."""
    if mscale and mscale_all_dim:
        return _temper(factor, mscale) / _temper(factor, mscale_all_dim)
    return _temper(factor, 1.0)


def _temper(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
