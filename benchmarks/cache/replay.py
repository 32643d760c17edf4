"""Hit rates of checkpoint and eviction policies on real request traces: the share of prompt tokens not computed.

    python -m benchmarks cache-table --trace FILE [--trace FILE ...] [--checkpoint-dtype FORMAT ...] [--plot PNG]

A trace is replayed through the cache code of one prefill node, with the bytes of a real model's blocks and states but
without a model: each request is admitted, prefilled in chunks and released before the next one comes. A trace names 512
tokens of a prompt by one id that is chained to those before it, so blocks have 512 tokens here and the id is the
block's key. Outputs are not in the traces: a node's answer is assumed to be unknown to the prefill node (nothing is
fetched from decode nodes), and to reach it as an ordinary part of the next turn's prompt.

Two bounds stand beside the policies: all bytes for attention blocks, as if states were free (`attention only`), and a
cache that never forgets (`infinite`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.shapes import SHAPES
from benchmarks.timing import table_header, table_row
from headrace.cache.checkpoint_slots import PackedPool
from headrace.cache.checkpoints import (
    CHECKPOINT_GRID_TOKENS,
    CHECKPOINT_POLICIES,
    DEFAULT_CHECKPOINT_POLICY,
    CheckpointPolicy,
    ChunkSpan,
    checkpoint_policy,
)
from headrace.cache.claims import Claim
from headrace.cache.eviction import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES, eviction_policy
from headrace.cache.hits import ResumeLocally
from headrace.cache.index import Checkpoint
from headrace.cache.layout import CacheLayout
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.stats import CacheStats
from headrace.cache.types import PrefixKey, SlotId
from headrace.engine.config import EngineConfig
from headrace.engine.pool_sizes import PoolSizes, state_share
from headrace.models.flops import attention_parity_position

BLOCK_TOKENS = 512
_RESUME = ResumeLocally()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`keys` are those of its full blocks."""

    num_tokens: int
    keys: Sequence[PrefixKey]


@dataclass(frozen=True)
class Trace:
    """The prompts of a trace in order."""

    name: str
    prompts: Sequence[Prompt]

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From a Mooncake file."""
        with path.open() as lines:
            rows = [json.loads(line) for line in lines]
        return cls(path.stem, [_prompt(row["input_length"], row["hash_ids"]) for row in rows])


def _prompt(num_tokens: int, hash_ids: Sequence[int]) -> Prompt:
    full = hash_ids[: num_tokens // BLOCK_TOKENS]
    return Prompt(num_tokens, [PrefixKey(hash_id.to_bytes(8, "little")) for hash_id in full])


@dataclass(frozen=True)
class Replayed:
    """Shares of all prompt tokens: resumed from, and matched by attention blocks alone."""

    resumed_share: float
    attention_share: float
    stats: CacheStats


class _Sequence:
    """A prompt that is being prefilled, as the engine's publisher sees it."""

    boundaries = ()  # the traces have no hints

    def __init__(self, claim: Claim, prompt: Prompt) -> None:
        self.held = claim
        self.keys = prompt.keys
        self.prompt_length = self.prefill_length = prompt.num_tokens
        self.num_computed = claim.reused_tokens
        self.prompt_checkpoint_positions: list[int] = []
        self.answer_checkpoints: list[Checkpoint] = []


def replay(trace: Trace, cache: PrefixCache, policy: CheckpointPolicy, chunk_tokens: int) -> Replayed:
    """Raises ValueError if a prompt does not fit the cache at all."""
    publisher = Publisher(cache, policy)
    resumed = attention = 0
    for prompt in trace.prompts:
        claim = cache.claim(
            prompt.keys,
            num_tokens=prompt.num_tokens,
            hit_policy=_RESUME,
            max_reuse_tokens=_RESUME.reuse_limit(prompt.num_tokens),
        )
        if claim is None:
            raise ValueError(f"a prompt of {prompt.num_tokens} tokens does not fit the cache: raise the budget")
        resumed += claim.reused_tokens
        attention += claim.hit.attention_tokens
        _prefill(publisher, _Sequence(claim, prompt), chunk_tokens)
        cache.release(claim)
    return Replayed(resumed / trace.num_tokens, attention / trace.num_tokens, cache.stats())


def _prefill(publisher: Publisher, sequence: _Sequence, chunk_tokens: int) -> None:
    for span in _chunks(sequence.num_computed, sequence.prompt_length, chunk_tokens):
        chunk = ScheduledChunk(sequence, span)
        publisher.prepare([chunk])
        sequence.num_computed = span.end
        publisher.written(chunk)


def _chunks(start: int, num_tokens: int, chunk_tokens: int) -> Iterator[ChunkSpan]:
    while start < num_tokens:
        end = min(start + chunk_tokens, num_tokens)
        if end < num_tokens:
            end = end // BLOCK_TOKENS * BLOCK_TOKENS
        yield ChunkSpan(start, end)
        start = end


ATTENTION_ONLY = "attention only"
DEFAULT_POLICY = (DEFAULT_CHECKPOINT_POLICY, DEFAULT_EVICTION_POLICY)
POLICIES = (
    (ATTENTION_ONLY, "lru"),
    ("none", "lru"),  # neither has a checkpoint to order
    *product([name for name in CHECKPOINT_POLICIES if name != "none"], EVICTION_POLICIES),
)


@dataclass(frozen=True)
class Setting:
    """One replay. `checkpoints` is a policy's name, with the format in which checkpoints are packed if they are
    (`branch int8`), or ATTENTION_ONLY; `share` None: the model's own."""

    shape: str
    budget_gb: float
    checkpoints: str
    eviction: str
    share: float | None = None
    chunk_tokens: int = 8192
    grid_tokens: int = CHECKPOINT_GRID_TOKENS


def layout_of(shape: str) -> CacheLayout:
    return SHAPES[shape].cache_layout(shape, "bfloat16", BLOCK_TOKENS)


def hit_share(trace: Trace, setting: Setting) -> float:
    """The share of prompt tokens resumed from; for the bound, matched by attention blocks."""
    model = SHAPES[setting.shape]
    layout = layout_of(setting.shape)
    is_bound = setting.checkpoints == ATTENTION_ONLY
    name, _, checkpoint_dtype = ("none" if is_bound else setting.checkpoints).partition(" ")
    if is_bound:
        sizes = PoolSizes(num_blocks=int(setting.budget_gb * 1e9) // layout.block_bytes, num_slots=3)
    else:
        config = EngineConfig(
            device="cuda",
            cache_bytes=int(setting.budget_gb * 1e9),
            state_share=setting.share,
            block_size=BLOCK_TOKENS,
            checkpoint_dtype=checkpoint_dtype or None,
        )
        sizes = PoolSizes.fit(layout, config, free_bytes=0, max_model_tokens=model.max_position)
    packed = PackedPool(sizes.num_packed_slots, sizes.num_emission_slots, _copy_nothing, _copy_nothing)
    cache = PrefixCache(
        num_blocks=sizes.num_blocks,
        num_slots=sizes.num_slots,
        packed=packed if checkpoint_dtype else None,
        block_size=BLOCK_TOKENS,
        eviction=eviction_policy(setting.eviction, attention_parity_position(model)),
    )
    policy = checkpoint_policy(name, setting.grid_tokens)
    replayed = replay(trace, cache, policy, setting.chunk_tokens)
    cache.check()
    return replayed.attention_share if is_bound else replayed.resumed_share


def _copy_nothing(source: SlotId, target: SlotId) -> None:
    """Stands for the copies of states, which a replay does not have."""


def infinite_share(trace: Trace) -> float:
    """The share of prompt tokens that a cache which forgets nothing and resumes anywhere would not compute."""
    known: set[bytes] = set()
    found = 0
    for prompt in trace.prompts:
        usable = prompt.keys[: (prompt.num_tokens - 1) // BLOCK_TOKENS]
        found += BLOCK_TOKENS * next((i for i, key in enumerate(usable) if key not in known), len(usable))
        known.update(prompt.keys)
    return found / trace.num_tokens


read_trace = lru_cache(maxsize=1)(Trace.read)  # in a worker process, which replays one trace many times


def _work(path: Path, setting: Setting) -> float:
    return hit_share(read_trace(path), setting)


@dataclass(frozen=True)
class Panel:
    """Percentages of one trace's prompt tokens that need no computing: of each policy, one a budget."""

    trace: str
    shape: str
    budgets_gb: Sequence[float]
    found: dict[tuple[str, str], list[float]]
    infinite: float

    def print(self) -> None:
        print(f"\n{self.trace}, {self.shape}: % of prompt tokens that need no computing\n")
        print(table_header("checkpoints", "eviction", *(f"{gb:g} GB" for gb in self.budgets_gb)))
        for (checkpoints, eviction), percentages in self.found.items():
            mark = "**" if (checkpoints, eviction) == DEFAULT_POLICY else ""
            cells = [f"{mark}{each:.1f}{mark}" for each in percentages]
            print(table_row(f"{mark}{checkpoints}{mark}", eviction, *cells))
        print(table_row("infinite", "", *(f"{self.infinite:.1f}" for _ in self.budgets_gb)), flush=True)

    def draw(self, axis: Any) -> None:
        for (checkpoints, eviction), percentages in self.found.items():
            if checkpoints != "none":
                style = "-" if eviction == DEFAULT_EVICTION_POLICY else "--"
                axis.plot(self.budgets_gb, percentages, style, marker="o", label=f"{checkpoints}, {eviction}")
        axis.axhline(self.infinite, color="grey", linewidth=0.8, label="infinite cache")
        axis.set(xscale="log", ylim=(0, None), title=f"{self.trace.removesuffix('_trace')}, {self.shape}")
        axis.set_xticks(self.budgets_gb, [f"{gb:g}" for gb in self.budgets_gb])
        axis.minorticks_off()


def plot(path: Path, panels: Sequence[Panel], num_columns: int) -> None:
    """Every panel: hit share over the budget, a line for each policy."""
    from matplotlib.figure import Figure

    num_rows = len(panels) // num_columns
    figure = Figure((5.2 * num_columns, 3.6 * num_rows), layout="tight")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel.draw(axis)
    axes[0][-1].legend(fontsize="small", loc="lower right")
    figure.supxlabel("GB for blocks and states")
    figure.supylabel("% of prompt tokens not computed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nplot: {path}")


def main(
    trace: Annotated[list[Path], typer.Option(help="Mooncake .jsonl; may be repeated")],
    shape: list[str] = [*SHAPES],  # noqa: B006
    budget_gb: list[float] = [100, 400, 1600],  # noqa: B006
    share: Annotated[float | None, typer.Option(help="of the budget, for states; default: the engine's ratio")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="of a prefill step; `align` depends on it")] = 8192,
    grid_tokens: Annotated[int, typer.Option(help="of `branch`")] = CHECKPOINT_GRID_TOKENS,
    checkpoint_dtype: Annotated[
        list[str], typer.Option(help="formats in which the default policies' checkpoints are also packed")
    ] = ["float16", "int8"],  # noqa: B006
    plot_to: Annotated[Path | None, typer.Option("--plot", help="write the figure here")] = None,
) -> None:
    """Hit rates of checkpoint and eviction policies on request traces."""
    for name in shape:
        states = share or state_share(layout_of(name), SHAPES[name].max_position)
        print(f"{name}: {100 * states:.1f} % of the bytes for states")
    packed = [(f"{DEFAULT_CHECKPOINT_POLICY} {dtype}", DEFAULT_EVICTION_POLICY) for dtype in checkpoint_dtype]
    policies = [*POLICIES, *packed]
    panels = []
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for path, name in product(trace, shape):
            settings = [
                Setting(name, gb, *policy, share, chunk_tokens, grid_tokens)
                for policy, gb in product(policies, budget_gb)
            ]
            percentages = (100 * each for each in workers.map(partial(_work, path), settings))
            found = {policy: [next(percentages) for _ in budget_gb] for policy in policies}
            panels.append(Panel(path.stem, name, budget_gb, found, 100 * infinite_share(read_trace(path))))
            panels[-1].print()
    if plot_to:
        plot(plot_to, panels, num_columns=len(shape))
