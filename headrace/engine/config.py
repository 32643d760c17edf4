"""How one node's engine is set up, and how large its two pools come out."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headrace.cache.checkpoints import CHECKPOINT_GRID_TOKENS, DEFAULT_CHECKPOINT_POLICY, checkpoint_policy
from headrace.cache.eviction import DEFAULT_EVICTION_POLICY, eviction_policy
from headrace.cache.layout import DTYPE_BYTES, CacheLayout

STATE_DTYPES = ("float32", "bfloat16")
LOAD_FORMATS = ("safetensors", "dummy")


class ConfigError(ValueError):
    """A setting cannot work; the message names the field, its value and the remedy."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine of one node.

    device             torch device: cpu, cuda, cuda:1
    dtype              of weights and attention blocks; None: float32 on a CPU (bf16 is slower there), else bfloat16
    state_dtype        of recurrent states; half the bytes in bfloat16. On a CPU float32 is the only one
    load_format        safetensors, or dummy: random weights for the shape in config.json, for benchmarks
    overlap            launch a step before the tokens of the one before it are known; None: on a GPU. On a CPU
                       there is nothing to gain, but tests ask for it
    cuda_graphs        on a GPU, decode steps and short prefills are captured once and replayed
    threads            torch's CPU threads; None: torch's own choice
    block_size         tokens a block; nodes of a cluster may differ, whoever hands over packs the other side's blocks
    cache_bytes        budget of both pools; None: a share of the memory that is free once the weights are loaded
    state_share        of that budget, for states and checkpoints, the rest is for blocks; None: one state for
                       every 8,192 tokens of blocks, or for an eighth of the model's length if that is less
    checkpoint_policy  none, align, every or branch (docs/cache-policy.md)
    checkpoint_grid_tokens  branch only: distance of the grid checkpoints, which are kept while slots are free
    eviction_policy    flop_aware or lru (docs/cache-policy.md)
    max_step_tokens    token budget of one step; longer prompts are prefilled in chunks of it
    max_running        requests in one step
    max_model_tokens   longest prompt + answer; None: what the checkpoint's config says
    """

    device: str = "cpu"
    dtype: str | None = None
    state_dtype: str = "float32"
    load_format: str = "safetensors"
    overlap: bool | None = None
    cuda_graphs: bool = True
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

    def __post_init__(self) -> None:
        checkpoint_policy(self.checkpoint_policy)
        eviction_policy(self.eviction_policy)
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        if self.state_dtype not in STATE_DTYPES:
            raise ConfigError(f"state_dtype {self.state_dtype!r}: use one of {', '.join(STATE_DTYPES)}")
        if self.is_on_cpu and self.state_dtype != "float32":
            raise ConfigError(f"state_dtype {self.state_dtype} on {self.device}: use float32, or a GPU")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format {self.load_format!r}: use one of {', '.join(LOAD_FORMATS)}")
        if self.state_share is not None and not 0 < self.state_share < 1:
            raise ConfigError(f"state_share {self.state_share}: must lie between 0 and 1, both pools need some")
        for name in ("block_size", "max_step_tokens", "max_running", "checkpoint_grid_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("threads", "cache_bytes", "max_model_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: must be at least 1, or left out")
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} < max_running {self.max_running}: "
                "every running request needs a token of the step's budget"
            )

    @property
    def model_dtype(self) -> str:
        if self.dtype is not None:
            return self.dtype
        return "float32" if self.is_on_cpu else "bfloat16"

    @property
    def is_on_cpu(self) -> bool:
        return self.device.partition(":")[0] == "cpu"

    @property
    def overlaps(self) -> bool:
        return self.overlap if self.overlap is not None else not self.is_on_cpu


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks and slots fit the budget; measured once, after the weights are loaded."""

    num_blocks: int
    num_slots: int

    @classmethod
    def fit(cls, layout: CacheLayout, config: EngineConfig, *, free_bytes: int, max_model_tokens: int) -> PoolSizes:
        """Raises ConfigError when the budget cannot hold a single request."""
        budget = config.cache_bytes or free_bytes
        share = config.state_share or state_share(layout, max_model_tokens)
        num_slots = int(budget * share) // layout.state_bytes
        num_blocks = int(budget * (1 - share)) // layout.block_bytes
        # One running state, one checkpoint, one to write next; blocks for a warm-up's shortest prompt and its answer.
        if num_slots < 3 or num_blocks < max(2, -(-3 // config.block_size)):
            raise ConfigError(
                f"cache_bytes {budget} holds {num_blocks} blocks of {layout.block_bytes} bytes and {num_slots} "
                f"states of {layout.state_bytes}: raise cache_bytes or move state_share {share:.2f}"
            )
        return cls(num_blocks, num_slots)


TOKENS_PER_STATE = 8192


def state_share(layout: CacheLayout, max_model_tokens: int) -> float:
    """The states' share of a budget in which each comes with blocks for what a request computes anew.

    How much that is, real traces say (docs/cache-policy.md); a model of short prompts computes less.
    """
    num_tokens = min(TOKENS_PER_STATE, max(max_model_tokens // 8, layout.block_size))
    block_bytes = num_tokens / layout.block_size * layout.block_bytes
    return layout.state_bytes / (layout.state_bytes + block_bytes)


CPU_SHARE = 0.1  # of the memory that is available: nodes of a test cluster share one machine
CUDA_SHARE = 0.85  # of what the weights left; the rest is for activations


def measure_free_bytes(device: torch.device) -> int:
    """What the pools of a node on `device` may take, now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)
