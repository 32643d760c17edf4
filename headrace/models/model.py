"""A hybrid decoder: embedding, a chain of mixers and feed-forwards, norm, head. One class for all families."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.layout import CacheLayout
from headrace.forward.forward_batch import ForwardBatch, LayerContext
from headrace.forward.memory import CacheMemory
from headrace.kernels.attention.rotary import rotary_angles
from headrace.kernels.dense.embed import embed
from headrace.kernels.dense.linear import LinearWeight
from headrace.models.branches import Branch, BranchChain
from headrace.models.config import ModelConfig
from headrace.models.raw_config import RawConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class Family:
    """A family of models: how its config is read, and under which names its tensors are found."""

    read_config: Callable[[RawConfig], ModelConfig]
    load_layer: Callable[[WeightSource, str, ModelConfig, int], tuple[Branch, ...]]  # weights, "…layers.3", config, 3
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    norm_offset: float = 0.0  # added to the stored weights of the final norm
    skipped: tuple[str, ...] = ()  # prefixes of parts that the engine does not run


@dataclass(frozen=True)
class HybridModel:
    """A loaded model. `fingerprint` identifies its config and weights to other nodes."""

    config: ModelConfig
    fingerprint: str
    embedding: Tensor  # [V, hidden]
    chain: BranchChain
    head: LinearWeight  # [V, hidden]
    rotary_frequencies: Tensor | None  # [rotary_dim / 2]; None without positional encoding

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def uses_last_token_queries(self) -> bool:
        """True if the last mixer is attention: it reads `ForwardBatch.last_token_queries`."""
        return self.chain.ends_in_attention

    def cache_layout(self, block_size: int, state_dtype: str = "float32") -> CacheLayout:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.config.cache_layout(self.fingerprint, dtype, block_size, state_dtype)

    def forward(self, batch: ForwardBatch, memory: CacheMemory) -> Tensor:
        """Runs one forward pass: caches in `memory` advance; returns float32 logits of the batch's logit rows."""
        return self.logits(self.hidden(batch, memory))

    def hidden(self, batch: ForwardBatch, memory: CacheMemory) -> Tensor:
        """`forward` up to the head: [logit rows, hidden], for `logits` of a few rows at a time."""
        context = LayerContext(batch, memory, self._rotary(batch.positions_T))
        x = embed(batch.tokens_T, self.embedding, self.config.embedding_multiplier)
        return self.chain(x, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [N, V] of rows of `hidden`."""
        return self.head.logits(hidden, self.config.logits_divisor)

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotary_frequencies is None:
            return None
        scaling = self.config.attention.rope_scaling
        return rotary_angles(positions_T, self.rotary_frequencies, 1.0 if scaling is None else scaling.attention_factor)
