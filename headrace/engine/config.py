"""Settings of one node's engine, and the sizes of its two pools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.cache.checkpoints import CHECKPOINT_GRID_TOKENS, CHECKPOINT_POLICIES, DEFAULT_CHECKPOINT_POLICY
from headrace.cache.eviction import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from headrace.cache.layout import DTYPE_BYTES, SCALED_STATES, STATE_FORMATS
from headrace.config import at_least, one_of, refuse
from headrace.speculation.config import SpeculationConfig

STATE_DTYPES = ("float32", "bfloat16")
CHECKPOINT_DTYPES = tuple(name for name in STATE_FORMATS if name != "float32")
LOAD_FORMATS = ("safetensors", "dummy")
QUANTIZATIONS = ("fp8",)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one node's engine.

    device             torch device: cpu, cuda, cuda:1
    dtype              of weights and attention blocks; if left out, bfloat16, on a CPU float32 (bf16 is slower there)
    state_dtype        of recurrent states; half the bytes in bfloat16. On a CPU float32 is the only one
    checkpoint_dtype   of recurrent states in checkpoints: bfloat16 or float16, int8 or fp8 (a quarter of float32, and a
                       scale for each row). They get a pool of their own, into which states are copied; if left out,
                       states become checkpoints as they are, without a copy (docs/cache-policy.md)
    load_format        safetensors, or dummy: random weights for the shape in config.json, for benchmarks
    quantization       fp8: matrices of layers are quantised as they are loaded, with a scale for each row. If left out
                       they stay as the checkpoint has them, which may be FP8 already
    overlap            launch a step before the tokens of the one before it are known; if left out, on a GPU alone.
                       On a CPU there is nothing to gain, but tests set it
    cuda_graphs        on a GPU, decode steps and prefills are captured once and replayed, drafts among them
    hopper_kernels     on a Hopper GPU, prompts use the variants of attention, SwiGLU and scans that are written for it;
                       false: the Triton kernels. Holds for the whole process, for engines built after it is set
    threads            torch's CPU threads; if left out, torch's own choice
    block_size         tokens a block; nodes of a cluster may differ: senders pack blocks of the receiver's size
    cache_bytes        budget of both pools; if left out, a share of the memory that is free once the weights are loaded
    state_share        of that budget, for states and checkpoints, the rest is for blocks; if left out, one state
                       for every 8,192 tokens of blocks, or for an eighth of the model's length if that is less
    checkpoint_policy  none, align, every or branch (docs/cache-policy.md)
    checkpoint_grid_tokens   branch only: distance of the grid checkpoints, which are kept while slots are free
    eviction_policy    flop_aware, reuse_aware or lru (docs/cache-policy.md)
    max_step_tokens    token budget of one step; longer prompts are prefilled in chunks. If decodes or shorter prompts
                       share the step, a token far into a prompt counts as several, by what its attention costs
    max_running        requests in one step
    max_model_tokens   longest prompt + answer; if left out, the model's own limit (config.json)
    speculation        drafts of answers' tokens, off by default (docs/speculation.md)
    """

    device: str = "cpu"
    dtype: str | None = None
    state_dtype: str = "float32"
    checkpoint_dtype: str | None = None
    load_format: str = "safetensors"
    quantization: str | None = None
    overlap: bool | None = None
    cuda_graphs: bool = True
    hopper_kernels: bool = True
    threads: int | None = None
    block_size: int = 16
    cache_bytes: int | None = None
    state_share: float | None = None
    checkpoint_policy: str = DEFAULT_CHECKPOINT_POLICY
    checkpoint_grid_tokens: int = CHECKPOINT_GRID_TOKENS
    eviction_policy: str = DEFAULT_EVICTION_POLICY
    max_step_tokens: int = 1024
    max_running: int = 64
    max_model_tokens: int | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        refuse(
            one_of(self, DTYPE_BYTES, "dtype"),
            one_of(self, STATE_DTYPES, "state_dtype"),
            one_of(self, CHECKPOINT_DTYPES, "checkpoint_dtype"),
            one_of(self, LOAD_FORMATS, "load_format"),
            one_of(self, QUANTIZATIONS, "quantization"),
            one_of(self, CHECKPOINT_POLICIES, "checkpoint_policy"),
            one_of(self, EVICTION_POLICIES, "eviction_policy"),
            at_least(self, 1, "block_size", "max_step_tokens", "max_running", "checkpoint_grid_tokens"),
            at_least(self, 1, "threads", "cache_bytes", "max_model_tokens", remedy=", or left out"),
            self._conflicts(),
        )

    def _conflicts(self) -> Iterator[str]:
        """Settings that do not go together, and those with a range of their own."""
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            yield f"device {self.device!r}: use cpu, cuda or cuda:1"
        if self.is_on_cpu and self.state_dtype == "bfloat16":
            yield f"state_dtype {self.state_dtype} on {self.device}: use float32, or a GPU"
        if self.state_dtype == "bfloat16" and self.checkpoint_dtype in DTYPE_BYTES:
            yield (
                f"checkpoint_dtype {self.checkpoint_dtype} with state_dtype {self.state_dtype}: as many bytes; leave "
                f"it out, or use {' or '.join(SCALED_STATES)}"
            )
        if self.state_share is not None and not 0 < self.state_share < 1:
            yield f"state_share {self.state_share}: must lie between 0 and 1, both pools need some"
        if 1 <= self.max_step_tokens < self.max_running:
            yield (
                f"max_step_tokens {self.max_step_tokens} < max_running {self.max_running}: "
                "every running request needs a token of the step's budget"
            )
        elif self.speculation.is_on and self.max_step_drafts < 1:
            yield (
                f"max_step_tokens {self.max_step_tokens}, max_running {self.max_running}: no row of a step is left for "
                f"drafts; raise max_step_tokens to {self.max_running + 2}, or set speculation.drafter: none"
            )

    @property
    def model_dtype(self) -> str:
        if self.dtype is not None:
            return self.dtype
        return "float32" if self.is_on_cpu else "bfloat16"

    @property
    def max_step_drafts(self) -> int:
        """Most drafts of a step: half of the tokens that `max_running` decodes leave; the other half is for prompts."""
        return (self.max_step_tokens - self.max_running) // 2

    @property
    def is_on_cpu(self) -> bool:
        return self.device.partition(":")[0] == "cpu"

    @property
    def overlaps(self) -> bool:
        return self.overlap if self.overlap is not None else not self.is_on_cpu
