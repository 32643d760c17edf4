"""Sizes of a node's pools: how its cache memory is split among blocks, running states and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.cache.layout import CacheLayout
from headrace.config import ConfigError
from headrace.engine.config import EngineConfig


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks and slots fit the budget; measured once, after the weights are loaded.

    num_slots            slots that claims can take; of checkpoints, too, unless these are packed
    num_draft_slots      slots beside those, for the states between drafts
    num_packed_slots     packed checkpoints
    num_emission_slots   slots beside all of these, for states from kernels until they are packed
    num_tail_rows        rows of the rings in which running sequences keep tails; 0: the model keeps none
    """

    num_blocks: int
    num_slots: int
    num_draft_slots: int = 0
    num_packed_slots: int = 0
    num_emission_slots: int = 0
    num_tail_rows: int = 0

    @property
    def num_states(self) -> int:
        """Slots of states that steps read and write."""
        return self.num_slots + self.num_draft_slots + self.num_emission_slots

    @classmethod
    def fit(
        cls,
        layout: CacheLayout,
        config: EngineConfig,
        *,
        free_bytes: int,
        max_model_tokens: int,
        most_draft_slots: int = 0,
        tail_row_bytes: int = 0,
    ) -> PoolSizes:
        """Raises ConfigError when the budget cannot hold a single request.

        most_draft_slots   that states need which rest on drafts, if there is room
        tail_row_bytes     of one row in the rings of all layers, which come out of `free_bytes`, not of `cache_bytes`;
                           0: the model keeps no tails
        """
        sizes = cls._within(config.cache_bytes or free_bytes, layout, config, max_model_tokens, most_draft_slots)
        if not tail_row_bytes:
            return sizes
        # A sequence with a tail has a state: memory that holds few of these needs few rows.
        num_rows = min(config.max_running + config.max_running // SPARE_TAILS, sizes.num_states)
        if config.cache_bytes is None:
            left_bytes = max(1, free_bytes - num_rows * tail_row_bytes)
            sizes = cls._within(left_bytes, layout, config, max_model_tokens, most_draft_slots)
        return replace(sizes, num_tail_rows=min(max(num_rows, WARM_UP_ROWS), sizes.num_states))

    @classmethod
    def _within(
        cls, budget: int, layout: CacheLayout, config: EngineConfig, max_model_tokens: int, most_draft_slots: int
    ) -> PoolSizes:
        split = _Split.of(layout, config, budget, max_model_tokens, most_draft_slots)
        num_blocks = split.block_bytes // layout.block_bytes
        num_states = split.running_bytes // layout.state_bytes
        # One running state, one checkpoint, one to write next; blocks for a warm-up's shortest prompt and its answer.
        if num_states < 3 or num_blocks < max(2, -(-3 // config.block_size)):
            raise ConfigError(
                f"cache_bytes {split.budget} holds {num_blocks} blocks of {layout.block_bytes} bytes and {num_states} "
                f"states of {layout.state_bytes}: raise cache_bytes or move state_share {split.state_share:.2f}"
            )
        num_draft_slots = min(most_draft_slots, int(num_states * DRAFT_SHARE))
        if most_draft_slots and not num_draft_slots:
            raise ConfigError(
                f"cache_bytes {split.budget} holds {num_states} states, and drafts get {DRAFT_SHARE:.0%} of them, "
                "which is none: raise cache_bytes or state_share, or set speculation.drafter: none"
            )
        if config.checkpoint_dtype is None:
            return cls(num_blocks, num_states - num_draft_slots, num_draft_slots)
        packed_bytes = split.state_bytes - num_states * layout.state_bytes
        num_packed = packed_bytes // layout.on_wire(config.checkpoint_dtype).state_bytes
        if num_packed < 1:
            raise ConfigError(
                f"cache_bytes {split.budget} holds {num_states} running states of {layout.state_bytes} bytes and no "
                f"checkpoint: raise cache_bytes, move state_share {split.state_share:.2f} or leave checkpoint_dtype out"
            )
        num_emission_slots = min(EMISSION_SLOTS, num_states // 3)
        num_slots = num_states - num_draft_slots - num_emission_slots
        return cls(num_blocks, num_slots, num_draft_slots, num_packed, num_emission_slots)


@dataclass(frozen=True)
class _Split:
    """Bytes of a budget for states of all kinds, and of these for running ones."""

    budget: int
    state_bytes: int
    running_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.budget - self.state_bytes

    @property
    def state_share(self) -> float:
        return self.state_bytes / self.budget

    @classmethod
    def of(
        cls, layout: CacheLayout, config: EngineConfig, budget: int, max_model_tokens: int, most_draft_slots: int
    ) -> _Split:
        if config.checkpoint_dtype is None:
            state_bytes = int(budget * (config.state_share or state_share(layout, max_model_tokens)))
            return cls(budget, state_bytes, state_bytes)
        packed = layout.on_wire(config.checkpoint_dtype)
        if packed.state_bytes >= layout.state_bytes:
            raise ConfigError(
                f"checkpoint_dtype {config.checkpoint_dtype}: a packed state of this model has {packed.state_bytes} "
                f"bytes, and a state {layout.state_bytes}; leave it out"
            )
        num_running = config.max_running + config.max_running // SPARE_RUNNING + EMISSION_SLOTS
        running_bytes = (num_running + most_draft_slots) * layout.state_bytes
        if config.state_share is not None:
            state_bytes = int(budget * config.state_share)
            return cls(budget, state_bytes, min(running_bytes, state_bytes // 2))
        running_bytes = min(running_bytes, budget // MOST_RUNNING)
        state_bytes = running_bytes + int((budget - running_bytes) * state_share(packed, max_model_tokens))
        return cls(budget, state_bytes, running_bytes)


DRAFT_SHARE = 1 / 4
"""Share of a node's slots that drafts get at most: where it holds few states, it drafts less."""

EMISSION_SLOTS = 16
"""States that kernels of one step emit at most where checkpoints are packed, as many as a captured pass writes."""

SPARE_RUNNING = 4
"""Slots of running states where checkpoints are packed: for `max_running` requests, and for 1/SPARE_RUNNING more that
wait for their turn or their state. Checkpoints get the rest of the states' bytes."""

SPARE_TAILS = 4
"""Tails are kept for `max_running` sequences, and for 1/SPARE_TAILS more that wait for their turn or are paused."""

WARM_UP_ROWS = 3  # that the warm-up's steps use

MOST_RUNNING = 4
"""Running states take at most 1/MOST_RUNNING of the budget where checkpoints are packed."""

TOKENS_PER_STATE = 8192


def state_share(layout: CacheLayout, max_model_tokens: int) -> float:
    """The states' share of a budget in which each comes with blocks for what a request computes anew.

    TOKENS_PER_STATE comes from real traces (docs/cache-policy.md); a model of short prompts computes less.
    """
    num_tokens = min(TOKENS_PER_STATE, max(max_model_tokens // 8, layout.block_size))
    block_bytes = num_tokens / layout.block_size * layout.block_bytes
    return layout.state_bytes / (layout.state_bytes + block_bytes)
