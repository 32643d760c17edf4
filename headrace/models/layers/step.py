"""What every layer of one forward pass shares."""

from dataclasses import dataclass

from torch import Tensor

from headrace.forward.forward_batch import StepPlan
from headrace.forward.memory import CacheMemory


@dataclass(frozen=True)
class Step:
    plan: StepPlan
    memory: CacheMemory
    rotary: tuple[Tensor, Tensor] | None  # cos and sin [T, 1, R]; None without positional encoding
