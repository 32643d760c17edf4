"""From a model folder and a config to an engine ready to run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headrace.cache.checkpoint_slots import PackedPool
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.eviction import eviction_policy
from headrace.cache.journal import Journal
from headrace.cache.layout import CacheLayout
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.tails import tail_interval, tail_places
from headrace.config import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.drafts.drafting import Drafting
from headrace.engine.drafts.mtp import MtpDrafts
from headrace.engine.engine import Engine
from headrace.engine.pool_sizes import PoolSizes
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.scheduling.cost_fit import prior_costs
from headrace.engine.scheduling.scheduler import LatestArrival, Scheduler
from headrace.engine.scheduling.step_budget import TokenCost
from headrace.engine.tail_rows import TailRows
from headrace.engine.warm_up import warm_up
from headrace.forward.memory import CacheMemory, use_device
from headrace.grammar import Grammars
from headrace.kernels.lib.dispatch import set_hopper_kernels
from headrace.kernels.lib.sizes import cdiv
from headrace.models.config import NoMtpLayer
from headrace.models.flops import attention_parity_position
from headrace.models.model import HybridModel
from headrace.models.weights import load_config, load_model, random_model
from headrace.speculation.config import MTP, draft_count, drafter_factory
from headrace.speculation.drafter import DrafterFactory


@dataclass(frozen=True)
class BuiltEngine:
    """An engine with the parts and sizes that its node uses directly."""

    engine: Engine
    journal: Journal
    memory: CacheMemory
    layout: CacheLayout
    sizes: PoolSizes
    max_model_tokens: int


def build_engine(model_path: str, config: EngineConfig, clock: Callable[[], float]) -> BuiltEngine:
    """Loads the weights and builds an engine around them. Raises ModelError, ConfigError."""
    num_gpus = torch.cuda.device_count()
    if not config.is_on_cpu and (torch.device(config.device).index or 0) >= num_gpus:
        raise ConfigError(f"device {config.device}: this process sees {num_gpus} GPUs; give one of them, or cpu")
    use_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return engine_around(_model(model_path, config), config, clock, Path(model_path) / "tokenizer.json")


def engine_around(
    model: HybridModel,
    config: EngineConfig,
    clock: Callable[[], float],
    tokenizer_file: Path | None = None,
    new_drafter: DrafterFactory | None = None,
) -> BuiltEngine:
    """Sizes the pools by the memory that the model left free, and warms a GPU up. Raises ConfigError.

    tokenizer_file   read when a request has a grammar; None: such requests are refused
    new_drafter      makes the drafters of requests; None: those that `config.speculation` names, if any
    """
    set_hopper_kernels(config.hopper_kernels)
    speculation = config.speculation
    drafts = speculation.is_on or new_drafter is not None
    max_drafts = _most_drafts(model, config) if drafts else 0
    by_layer = new_drafter is None and speculation.drafter == MTP
    layout = model.cache_layout(config.block_size, config.state_dtype)
    longest = config.max_model_tokens or model.config.max_position
    sizes = PoolSizes.fit(
        layout,
        config,
        free_bytes=measure_free_bytes(torch.device(config.device)),
        max_model_tokens=longest,
        most_draft_slots=_most_draft_slots(config.max_running, max_drafts, model.has_tails, by_layer),
        tail_row_bytes=model.tail_row_bytes(tail_places(config.block_size)),
    )
    memory = CacheMemory(
        layout,
        sizes.num_blocks,
        sizes.num_states,
        config.device,
        checkpoint_dtype=config.checkpoint_dtype,
        num_packed_slots=sizes.num_packed_slots,
        num_tail_rows=sizes.num_tail_rows,
    )
    max_model_tokens = min(longest, sizes.num_blocks * config.block_size)
    parity_depth = attention_parity_position(model.config)
    journal = Journal()
    runner = ModelRunner(model, memory)
    if not config.is_on_cpu:
        warm_up(
            runner,
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            max_tokens=max_model_tokens,
            max_drafts=max_drafts,
            graphs=config.cuda_graphs,
        )
    cache = PrefixCache(
        num_blocks=sizes.num_blocks,
        num_slots=sizes.num_slots,
        block_size=config.block_size,
        num_draft_slots=sizes.num_draft_slots,
        packed=_packed_pool(memory, sizes),
        eviction=eviction_policy(config.eviction_policy, parity_depth),
        on_events=journal.record,
    )
    drafting = None
    if drafts:
        most_step_drafts = config.max_step_drafts
        if not model.has_tails:
            most_step_drafts = min(most_step_drafts, sizes.num_draft_slots)
        rules = StopRules(model.config.eos_token_ids, max_model_tokens)
        drafting = Drafting(
            MtpDrafts(runner, cache, rules) if by_layer else new_drafter or drafter_factory(speculation),
            draft_count(speculation, most_step_drafts),
            max_drafts=max_drafts,
            block_size=config.block_size,
            max_step_tokens=config.max_step_tokens,
            rules=rules,
        )
    engine = Engine(
        runner,
        cache,
        checkpoint_policy(config.checkpoint_policy, config.checkpoint_grid_tokens),
        Scheduler(
            config.max_step_tokens,
            config.max_running,
            config.block_size,
            TokenCost.in_tokens(parity_depth),
            CPU_ROW if config.is_on_cpu else 0.0,
            runner.prefill_rows,
        ),
        LatestArrival(),
        eos_token_ids=model.config.eos_token_ids,
        vocab_size=model.config.vocab_size,
        max_model_tokens=max_model_tokens,
        num_blocks=sizes.num_blocks,
        prior_costs=prior_costs(attention_parity_position(model.config)),
        grammars=Grammars(tokenizer_file, model.config.vocab_size, model.config.eos_token_ids),
        overlap=config.overlaps,
        clock=clock,
        tail_rows=TailRows(memory.num_tail_rows, tail_interval(config.block_size)) if model.has_tails else None,
        drafting=drafting,
    )
    return BuiltEngine(engine, journal, memory, layout, sizes, max_model_tokens)


def _most_drafts(model: HybridModel, config: EngineConfig) -> int:
    """Drafts of a request in a step: where a model keeps tails, a step crosses one written state at most."""
    most = config.speculation.max_drafts
    if model.has_tails:
        most = min(most, tail_interval(config.block_size) - 1)
    if most < 1:
        raise ConfigError(f"block_size {config.block_size}: drafts need blocks of 2 tokens or more; use 16")
    return most


def _most_draft_slots(max_running: int, max_drafts: int, has_tails: bool, by_layer: bool) -> int:
    """Slots for states that rest on drafts. With tails a step writes one such state a request at most.

    With a layer the next check is launched before it is known how far the one before comes: each takes a slot wherever
    a state may be written, together of 7 in 8 requests with 3 drafts and states every 16 tokens. Half as many again as
    requests leave room for more of them at once; where slots are short, the host waits for the first check.
    """
    if not max_drafts:
        return 0
    if not has_tails:
        return max_running * max_drafts
    return cdiv(3 * max_running, 2) if by_layer else max_running


def _packed_pool(memory: CacheMemory, sizes: PoolSizes) -> PackedPool | None:
    if not sizes.num_packed_slots:
        return None
    return PackedPool(sizes.num_packed_slots, sizes.num_emission_slots, memory.pack, memory.unpack)


def _model(path: str, config: EngineConfig) -> HybridModel:
    dtype, speculation = getattr(torch, config.model_dtype), config.speculation
    try:
        is_dummy = config.load_format == "dummy"
        make = partial(random_model, load_config(path)) if is_dummy else partial(load_model, path)
        return make(
            dtype,
            config.device,
            with_mtp=speculation.drafter == MTP,
            draft_vocabulary=speculation.draft_vocabulary,
            quantization=config.quantization,
        )
    except NoMtpLayer as error:
        raise ConfigError(f"speculation.drafter {MTP}: {error}; set drafter: ngram, suffix or none") from error


CPU_ROW = 1 / 6
"""An answer's part of a step, as a share of the step's own time: the shipped models on one core. A GPU reads weights
once for all of them."""
CPU_SHARE = 0.1  # of the available memory: nodes of a test cluster share one machine
CUDA_SHARE = 0.85  # of the memory that the weights left; the rest is for activations


def measure_free_bytes(device: torch.device) -> int:
    """Memory that the pools of a node on `device` may take now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)
