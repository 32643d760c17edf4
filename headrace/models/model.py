"""A hybrid decoder: embedding, layers of mixer and feed-forward, norm, head. One class for all families."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.cache.layout import CacheLayout
from headrace.forward.forward_batch import ForwardBatch, LayerContext
from headrace.forward.memory import CacheMemory
from headrace.kernels.attention.rotary import rotary_angles
from headrace.kernels.dense.embed import embed
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product, add_branch
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.models.config import ModelConfig
from headrace.models.layers.attention import Attention
from headrace.models.raw_config import RawConfig
from headrace.models.weight_files import WeightSource


@dataclass(frozen=True)
class DecoderLayer:
    """Two residual branches, each behind its own norm. Each replaces the stream `x`, in place where it can."""

    mixer: Callable[[Tensor, LayerContext], Product]
    feed_forward: Callable[[Tensor], Tensor | Product]
    mixer_norm: Tensor  # float32, as all norm weights
    feed_forward_norm: Tensor
    norm_eps: float
    residual_multiplier: float

    def mix(self, x: Tensor, normed: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """The mixer's branch: x after it, and that through `feed_forward_norm`. `normed`: x through `mixer_norm`."""
        return self._add(x, self.mixer(normed, context), self.feed_forward_norm)

    def mix_rows(self, x: Tensor, normed: Tensor, context: LayerContext, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`mix` for the outputs of `rows` only, when later layers read no others. The caches advance by all rows."""
        if isinstance(self.mixer, Attention) and (len(rows) == 0 or context.batch.last_token_queries is not None):
            # One query a sequence or none at all, instead of the square of the chunk.
            mixed = self.mixer.attend_rows(normed, context, rows)
        else:
            mixed = self.mixer(normed, context).of_rows(rows)
        return self._add(x.index_select(0, rows), mixed, self.feed_forward_norm)

    def feed(self, x: Tensor, normed: Tensor, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        """The feed-forward's branch: x after it, and that through the model's next norm."""
        return self._add(x, self.feed_forward(normed), next_norm)

    def _add(self, x: Tensor, branch: Tensor | Product, norm: Tensor) -> tuple[Tensor, Tensor]:
        return add_branch(x, branch, self.residual_multiplier, norm, self.norm_eps)


@dataclass(frozen=True)
class Family:
    """A family of models: how its config is read, and under which names its tensors are found."""

    read_config: Callable[[RawConfig], ModelConfig]
    load_layer: Callable[[WeightSource, str, ModelConfig, int], DecoderLayer]  # weights, "…layers.3", config, 3
    final_norm: str = "norm"
    norm_offset: float = 0.0  # added to the stored weights of the final norm
    skipped: tuple[str, ...] = ()  # prefixes of parts that the engine does not run


@dataclass(frozen=True)
class HybridModel:
    """A loaded model. `fingerprint` identifies its config and weights to other nodes."""

    config: ModelConfig
    fingerprint: str
    embedding: Tensor  # [V, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: Tensor  # float32
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
        """True if the last layer is attention: it reads `ForwardBatch.last_token_queries` in `mix_rows`."""
        return isinstance(self.layers[-1].mixer, Attention)

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
        normed = rms_norm(x, self.layers[0].mixer_norm, self.config.norm_eps)
        for layer, following in pairwise(self.layers):
            x, normed = layer.feed(*layer.mix(x, normed, context), following.mixer_norm)
        last, rows = self.layers[-1], batch.logit_rows
        mixed = last.mix(x, normed, context) if rows is None else last.mix_rows(x, normed, context, rows)
        _, normed = last.feed(*mixed, self.norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [N, V] of rows of `hidden`."""
        return self.head.logits(hidden, self.config.logits_divisor)

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotary_frequencies is None:
            return None
        return rotary_angles(positions_T, self.rotary_frequencies)
