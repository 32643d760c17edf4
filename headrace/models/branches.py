"""The residual stream of a decoder: a chain of branches, each a mixer or a feed-forward behind its own norm.

    x += multiplier * branch(norm(x))       an addition and the norm of the next branch are one step

Most families' layers are a mixer's branch and a feed-forward's, Nemotron's are one branch each. OLMo's attention layers
norm what a branch gives instead of what it reads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from headrace.forward.forward_batch import LayerContext
from headrace.kernels.dense.fp8_rows import Fp8Format, Rows, plain_rows
from headrace.kernels.dense.residual import Product, add_branch, whole
from headrace.kernels.dense.rms_norm import rms_norm, rms_norm_rows
from headrace.models.layers.attention import Attention
from headrace.models.layers.gated_delta import GatedDelta
from headrace.models.layers.latent_attention import LatentAttention
from headrace.models.layers.mamba2 import Mamba2
from headrace.models.layers.parallel_mixers import ParallelMixers


class Mixer(Protocol):
    @property
    def reads(self) -> Fp8Format | None:
        """The format of rows that its products read; None: 16 bits."""

    def __call__(self, x: Rows, context: LayerContext) -> Product: ...


class FeedForward(Protocol):
    @property
    def reads(self) -> Fp8Format | None:
        """As a mixer's."""

    def __call__(self, x: Rows) -> Tensor | Product: ...


@dataclass(frozen=True)
class MixerBranch:
    """A branch that mixes rows of one sequence and advances its caches."""

    mixer: Mixer
    norm: Tensor | None  # float32, as all norm weights; None: it reads the stream as it is
    post_norm: Tensor | None = None  # of its output

    @property
    def reads(self) -> Fp8Format | None:
        return self.mixer.reads

    def output(self, normed: Rows, context: LayerContext) -> Product:
        return self.mixer(normed, context)

    def output_of_rows(self, normed: Rows, context: LayerContext, rows: Tensor) -> Product:
        """`output` of `rows` only, when no later branch reads others. The caches advance by all rows."""
        if isinstance(self.mixer, Attention | LatentAttention) and (
            len(rows) == 0 or context.batch.last_token_queries is not None
        ):
            # One query a sequence or none at all, instead of the square of the chunk.
            return self.mixer.attend_rows(normed, context, rows)
        return self.mixer(normed, context).of_rows(rows)


@dataclass(frozen=True)
class FeedForwardBranch:
    """A branch that sees each row by itself."""

    feed_forward: FeedForward
    norm: Tensor | None
    post_norm: Tensor | None = None

    @property
    def reads(self) -> Fp8Format | None:
        return self.feed_forward.reads

    def output(self, normed: Rows, context: LayerContext) -> Tensor | Product:
        return self.feed_forward(normed)


Branch = MixerBranch | FeedForwardBranch


@dataclass(frozen=True)
class BranchChain:
    """All branches of a decoder in order, and the norm behind the last."""

    branches: tuple[Branch, ...]
    final_norm: Tensor
    norm_eps: float
    residual_multiplier: float

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """The stream x [T, hidden] behind the final norm: the batch's logit rows. x is overwritten where it can be."""
        rows = context.batch.logit_rows
        first = self.branches[0]
        normed: Rows = x if first.norm is None else rms_norm_rows(x, first.norm, self.norm_eps, first.reads)
        for i, (branch, next_norm, next_reads) in enumerate(self._steps):
            if i == self._last_mixer and rows is not None and isinstance(branch, MixerBranch):
                output: Tensor | Product = branch.output_of_rows(normed, context, rows)
                x = x.index_select(0, rows)
            else:
                output = branch.output(normed, context)
            if branch.post_norm is not None:
                output = rms_norm(whole(output), branch.post_norm, self.norm_eps)
            if next_norm is None:
                x = normed = torch.add(x, whole(output), alpha=self.residual_multiplier)
            else:
                x, normed = add_branch(x, output, self.residual_multiplier, next_norm, self.norm_eps, next_reads)
        return plain_rows(normed)

    @property
    def ends_in_attention(self) -> bool:
        """True if the last mixer is attention: it reads `ForwardBatch.last_token_queries`."""
        last = self.branches[self._last_mixer]
        return isinstance(last, MixerBranch) and isinstance(last.mixer, Attention | LatentAttention)

    @cached_property
    def tailed_layers(self) -> tuple[Mamba2 | GatedDelta, ...]:
        """The state layers, in the order of their place in a state, if they keep tails; all of a model do, or none."""
        mixers = [branch.mixer for branch in self.branches if isinstance(branch, MixerBranch)]
        layers = [mixer.state if isinstance(mixer, ParallelMixers) else mixer for mixer in mixers]
        return tuple(layer for layer in layers if isinstance(layer, Mamba2 | GatedDelta))

    @cached_property
    def _steps(self) -> tuple[tuple[Branch, Tensor | None, Fp8Format | None], ...]:
        """Each branch, the norm behind it, and the format in which that norm's rows are read."""
        behind = [(branch.norm, branch.reads) for branch in self.branches[1:]]
        followed = zip(self.branches, [*behind, (self.final_norm, None)], strict=True)
        return tuple((branch, norm, reads) for branch, (norm, reads) in followed)

    @cached_property
    def _last_mixer(self) -> int:
        """The last branch that reads other rows than the logits'."""
        return max(i for i, branch in enumerate(self.branches) if isinstance(branch, MixerBranch))
