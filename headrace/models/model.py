"""A hybrid decoder: embedding, a chain of mixers and feed-forwards, norm, head. One class for all families."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headrace.cache.layout import CacheLayout, StateGroup
from headrace.forward.forward_batch import ForwardBatch, LayerContext
from headrace.forward.memory import CacheMemory, LayerTail
from headrace.kernels.attention.rotary import rotary_angles
from headrace.kernels.conv.tail_update import causal_conv1d_tail_update
from headrace.kernels.dense.embed import embed
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.lib.tails import Tails
from headrace.kernels.sampling.argmax import argmax
from headrace.kernels.sampling.last_vectors import read_last_vectors
from headrace.models.branches import Branch, BranchChain
from headrace.models.config import ModelConfig
from headrace.models.draft_head import DraftHead
from headrace.models.logits import Logits
from headrace.models.mtp import MtpLayer, shift_rows
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
    load_mtp: Callable[[WeightSource, ModelConfig], MtpLayer] | None = None  # None: the family has none


@dataclass(frozen=True)
class HybridModel:
    """A loaded model. `fingerprint` identifies its config and weights to other nodes."""

    config: ModelConfig
    fingerprint: str
    embedding: Tensor  # [V, hidden]
    chain: BranchChain
    head: LinearWeight  # [V, hidden]
    rotary_frequencies: Tensor | None  # [rotary_dim / 2]; None without positional encoding
    mtp: MtpLayer | None = (
        None  # loaded on demand: its entries are one more attention group, the last vector a state group
    )
    draft_head: DraftHead | None = None  # there is one with `mtp`

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
        layout = self.config.cache_layout(self.fingerprint, dtype, block_size, state_dtype)
        if self.mtp is None:
            return layout
        entries = self.config.attention.cache_group(1)
        last_vector = StateGroup(1, conv_shape=(self.config.hidden_size, 1))  # a window of one token
        return replace(
            layout,
            attention_groups=(*layout.attention_groups, entries),
            state_groups=(*layout.state_groups, last_vector),
        )

    @property
    def has_tails(self) -> bool:
        """True if decodes keep what they add to states in rings, and write a state now and then."""
        return bool(self.chain.tailed_layers)

    def new_tails(self, num_rows: int, num_places: int) -> tuple[LayerTail, ...]:
        """A ring for each state layer that keeps tails, uninitialised, and one for the MTP layer's last vectors."""
        tails = [layer.new_tail(num_rows, num_places) for layer in self.chain.tailed_layers]
        if self.mtp is not None:
            vectors = self.embedding.new_empty(num_rows, num_places, self.config.hidden_size)
            tails.append(LayerTail(vectors, None))
        return tuple(tails)

    def tail_row_bytes(self, num_places: int) -> int:
        """Bytes of one running sequence's rows in all rings; 0 without tails."""
        return sum(part.nbytes for tail in self.new_tails(1, num_places) for part in tail.parts)

    def write_states(self, tails: Tails, memory: CacheMemory) -> None:
        """Writes the states that these tails, of no rows, ask for."""
        for layer in self.chain.tailed_layers:
            layer.write_states(tails, memory)
        if self.mtp is not None:
            no_rows = self.embedding.new_empty(0, self.config.hidden_size)
            vectors = self._vector_pool(memory), self._vector_tail(memory)
            causal_conv1d_tail_update(no_rows, self._previous_row, None, *vectors, tails, silu=False)

    def forward(self, batch: ForwardBatch, memory: CacheMemory, out: Tensor | None = None) -> Logits:
        """Runs one forward pass: caches in `memory` advance; returns the logits of the batch's logit rows.

        out   [as many rows or more, V] in the model's dtype: they are its first rows; None: a tensor of their own
        """
        hidden = self.hidden(batch, memory)
        return self.logits(hidden, None if out is None else out[: len(hidden)])

    def hidden(self, batch: ForwardBatch, memory: CacheMemory) -> Tensor:
        """`forward` up to the head: [logit rows, hidden], for `logits` of a few rows at a time."""
        embedded, context = self._embedded(batch), self._context(batch, memory)
        if self.mtp is None:
            return self.chain(embedded, context)
        # The chain overwrites its input.
        every_row = self.chain(embedded.clone(), replace(context, batch=replace(batch, logit_rows=None)))
        vectors = self._vector_pool(memory), self._vector_tail(memory)
        previous = shift_rows(every_row, batch, self._previous_row, *vectors)
        self.mtp.store(embedded, previous, context)
        return every_row if batch.logit_rows is None else every_row.index_select(0, batch.logit_rows)

    def last_hidden(self, memory: CacheMemory, places: Tensor, out: Tensor | None = None) -> Tensor:
        """`hidden` [N, hidden] of the last tokens of N sequences, for their first drafts, written to `out` if given.

        places   int64 [N], where they lie: the number of a state's slot, or a `CacheMemory.ring_place`; -1: zeros, for
                 a captured pass's padding
        """
        pool, ring = self._vector_pool(memory)[..., 0], self._vector_tail(memory).flatten(0, 1)
        vectors = pool.new_empty(len(places), self.config.hidden_size) if out is None else out
        read_last_vectors(places, pool, ring, vectors)
        return vectors

    def draft_hidden(self, batch: ForwardBatch, memory: CacheMemory, previous: Tensor) -> Tensor:
        """The MTP layer's vectors [N, hidden], whose `best_drafts` are the tokens after each row's.

        batch      decodes alone, each behind position 0; states stay as they are
        previous   [N, hidden]: `last_hidden` of the tokens before, or `draft_hidden` of the draft before
        """
        if self.mtp is None:
            raise ValueError(f"{self.config.architecture} was loaded without its MTP layer: load it with_mtp")
        return self.mtp(self._embedded(batch), previous, self._context(batch, memory))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Logits:
        """Logits [N, V] of rows of `hidden`, written to `out` if given."""
        return Logits(self.head(hidden, out), self.config.logits_divisor)

    def best_drafts(self, hidden: Tensor, out: Tensor) -> None:
        """Writes the tokens int64 [N] that rows of `draft_hidden` draft: the scale of their logits does not matter."""
        assert self.draft_head is not None
        argmax(self.draft_head(hidden), out, self.draft_head.ids)

    def _embedded(self, batch: ForwardBatch) -> Tensor:
        return embed(batch.tokens_T, self.embedding, self.config.embedding_multiplier)

    def _context(self, batch: ForwardBatch, memory: CacheMemory) -> LayerContext:
        return LayerContext(batch, memory, self._rotary(batch.positions_T))

    @cached_property
    def _previous_row(self) -> Tensor:
        taps = torch.zeros(self.config.hidden_size, 2, dtype=self.dtype, device=self.device)
        taps[:, 0] = 1
        return taps

    def _vector_pool(self, memory: CacheMemory) -> Tensor:
        """[num_slots, hidden, 1]: the state group behind the model's own."""
        return memory.state_pools[self.config.num_state_layers].conv

    def _vector_tail(self, memory: CacheMemory) -> Tensor:
        """[rows, places, hidden]."""
        return memory.tails[self.config.num_state_layers].conv

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotary_frequencies is None:
            return None
        scaling = self.config.attention.rope_scaling
        return rotary_angles(positions_T, self.rotary_frequencies, 1.0 if scaling is None else scaling.attention_factor)
