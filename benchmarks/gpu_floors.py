"""The work of the first table of shared/anchors/h200.md: vLLM's time, the chip's floor, and what is to be reached.

A floor is the work's FLOPs over the matrix rate or its bytes over the copy rate, whichever takes longer: for a
prefill every weight meets every token, for a decode step every weight, state and cached token is read once and
every state written once, in bfloat16. Attention and launch gaps are left out: a bound, not a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_timing import BYTES_A_SECOND, FLOPS_A_SECOND
from benchmarks.shapes import GRANITE_H_MICRO
from headrace.models.config import ModelConfig
from headrace.models.flops import num_weights

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One row. The last two are milliseconds for granite-h-micro; None where the anchor does not know the row."""

    name: str
    num_sequences: int
    vllm_ms: float | None
    reach_ms: float | None


@dataclass(frozen=True)
class Prefill(Work):
    """Prompts of `num_tokens` from start to first token; `num_checkpoints` states are kept in each on the way.

    Of each prompt the first `num_cached` tokens are there already. Short prefills are replays of graphs, unless
    `is_launched` kernel by kernel.
    """

    num_tokens: int = 0
    num_checkpoints: int = 1
    num_cached: int = 0
    is_launched: bool = False

    @property
    def num_rows(self) -> int:
        """What is computed."""
        return self.num_sequences * (self.num_tokens - self.num_cached)


@dataclass(frozen=True)
class Decode(Work):
    """One step in which each sequence has `context` tokens behind it."""

    context: int = 256

    @property
    def num_rows(self) -> int:
        return self.num_sequences


WORKS: tuple[Prefill | Decode, ...] = (
    Prefill("prefill 2,048", 1, 52.6, 30.0, num_tokens=2048),
    Prefill("prefill 8,192", 1, 111.5, 90.0, num_tokens=8192),
    Prefill("prefill 32,768", 1, 473.0, 380.0, num_tokens=32768),
    Prefill("prefill 32,768, 64 checkpoints", 1, None, None, num_tokens=32768, num_checkpoints=64),
    Prefill("prefill 16 x 4,096", 16, 65536 / 71.5, 65536 / 90.0, num_tokens=4096),
    *(
        Prefill(
            f"prefill {num_new:,} behind 8,176{', launched' if is_launched else ''}",
            1,
            None,
            None,
            num_tokens=8176 + num_new,
            num_cached=8176,
            is_launched=is_launched,
        )
        for num_new in (16, 64, 256, 512, 1024, 2048)
        for is_launched in (False, True)
    ),
    Decode("decode batch 1", 1, 3.49, 2.2),
    Decode("decode batch 16", 16, 3.88, 2.8),
    Decode("decode batch 64", 64, 6.13, 4.2),
    Decode("decode batch 256", 256, 17.28, 10.0),
    Decode("decode batch 64, context 8,192", 64, 8.69, 6.0, context=8192),
)


def floor_ms(work: Prefill | Decode, config: ModelConfig) -> float:
    """The least time of this work for a model of that shape."""
    weights = num_weights(config)
    layout = config.cache_layout("", "bfloat16", BLOCK_SIZE, "bfloat16")
    context = work.num_cached if isinstance(work, Prefill) else work.context
    cached_bytes = 2 * layout.state_bytes + context * layout.block_bytes / BLOCK_SIZE
    moving_ms = 1e3 * (2 * weights + work.num_sequences * cached_bytes) / BYTES_A_SECOND
    return max(moving_ms, 2e3 * weights * work.num_rows / FLOPS_A_SECOND)


def reach_ms(work: Prefill | Decode, config: ModelConfig) -> float | None:
    """The anchor's target; for another shape the same multiple of the floor."""
    if work.reach_ms is None:
        return None
    return work.reach_ms * floor_ms(work, config) / floor_ms(work, GRANITE_H_MICRO)
