"""What every layer of one forward pass shares."""

from dataclasses import dataclass

from torch import Tensor

from engine.memory import CacheMemory
from engine.step_plan import StepPlan


@dataclass(frozen=True)
class Step:
    plan: StepPlan
    memory: CacheMemory
    rotary: tuple[Tensor, Tensor] | None  # cos and sin [T, 1, R]; None without positional encoding
