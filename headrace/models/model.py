"""A hybrid decoder: embedding, layers of mixer and feed-forward, norm, head. One class for all families."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.cache.layout import CacheLayout
from headrace.forward.forward_batch import StepPlan
from headrace.forward.memory import CacheMemory
from headrace.kernels.attention.rotary import rotary_angles
from headrace.kernels.dense.embed import embed
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product, add_branch
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.models.config import ModelConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.step import Step


@dataclass(frozen=True)
class DecoderLayer:
    """Two residual branches, each behind its own norm. Each replaces the stream `x`, in place where it can."""

    mixer: Callable[[Tensor, Step], Product]
    feed_forward: Callable[[Tensor], Tensor | Product]
    mixer_norm: Tensor  # float32, as all norm weights
    feed_forward_norm: Tensor
    norm_eps: float
    residual_multiplier: float

    def mix(self, x: Tensor, normed: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """x and x through `mixer_norm`; returns x behind the mixer, and that through `feed_forward_norm`."""
        return self._add(x, self.mixer(normed, step), self.feed_forward_norm)

    def mix_rows(self, x: Tensor, normed: Tensor, step: Step, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`mix`, of `rows` only: what follows looks at no others. The caches advance by all rows."""
        if isinstance(self.mixer, Attention) and (len(rows) == 0 or step.plan.tails is not None):
            # One query a sequence or none at all, instead of the square of the chunk.
            mixed = self.mixer.tail(normed, step, rows)
        else:
            mixed = self.mixer(normed, step).of_rows(rows)
        return self._add(x.index_select(0, rows), mixed, self.feed_forward_norm)

    def feed(self, x: Tensor, normed: Tensor, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        """x behind the feed-forward, and that through the norm that comes next in the model."""
        return self._add(x, self.feed_forward(normed), next_norm)

    def _add(self, x: Tensor, branch: Tensor | Product, norm: Tensor) -> tuple[Tensor, Tensor]:
        return add_branch(x, branch, self.residual_multiplier, norm, self.norm_eps)


@dataclass(frozen=True)
class HybridModel:
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
    def reads_tails(self) -> bool:
        """Whether it asks for `StepPlan.tails`: where the last layer attends (see `DecoderLayer.mix_rows`)."""
        return isinstance(self.layers[-1].mixer, Attention)

    def cache_layout(self, block_size: int, state_dtype: str = "float32") -> CacheLayout:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.config.cache_layout(self.fingerprint, dtype, block_size, state_dtype)

    def forward(self, plan: StepPlan, memory: CacheMemory) -> Tensor:
        """Run one step: caches in `memory` advance; float32 logits of the plan's logit rows come back."""
        step = Step(plan, memory, self._rotary(plan.positions_T))
        x = embed(plan.tokens_T, self.embedding, self.config.embedding_multiplier)
        normed = rms_norm(x, self.layers[0].mixer_norm, self.config.norm_eps)
        for layer, following in pairwise(self.layers):
            x, normed = layer.feed(*layer.mix(x, normed, step), following.mixer_norm)
        last, rows = self.layers[-1], plan.logit_rows
        mixed = last.mix(x, normed, step) if rows is None else last.mix_rows(x, normed, step, rows)
        _, normed = last.feed(*mixed, self.norm)
        return self.head.logits(normed, self.config.logits_divisor)

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotary_frequencies is None:
            return None
        return rotary_angles(positions_T, self.rotary_frequencies)
