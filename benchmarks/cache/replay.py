"""Hit rates of checkpoint and eviction policies on real request traces: the share of prompt tokens not computed.

    python -m benchmarks cache-table --trace FILE [--trace FILE ...] [--plot PNG]

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
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.shapes import SHAPES
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
from headrace.cache.types import PrefixKey
from headrace.engine.config import state_share
from headrace.models.flops import attention_tokens

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
    def read(cls, path: Path, limit: int | None = None) -> Trace:
        """From a Mooncake file; only the first `limit` requests, if given."""
        with path.open() as lines:
            rows = [json.loads(line) for line in islice(lines, limit)]
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
        self.checkpoints: list[int] = []
        self.decoded: list[Checkpoint] = []


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


BUDGETS_GB = (100, 400, 1600)
ATTENTION_ONLY = "attention only"


@dataclass(frozen=True)
class Setting:
    """One replay. `checkpoints` is a policy's name or ATTENTION_ONLY; `share` None: the model's own."""

    shape: str
    budget_gb: float
    checkpoints: str
    eviction: str
    share: float | None


@dataclass(frozen=True)
class Options:
    chunk_tokens: int
    checkpoint_grid_tokens: int
    limit: int | None


def layout_of(shape: str) -> CacheLayout:
    return SHAPES[shape].cache_layout(shape, "bfloat16", BLOCK_TOKENS)


def hit_share(trace: Trace, setting: Setting, options: Options) -> float:
    """The share of prompt tokens resumed from; for the bound, matched by attention blocks."""
    model = SHAPES[setting.shape]
    layout = layout_of(setting.shape)
    budget = int(setting.budget_gb * 1e9)
    is_bound = setting.checkpoints == ATTENTION_ONLY
    share = 0.0 if is_bound else setting.share or state_share(layout, model.max_position)
    cache = PrefixCache(
        num_blocks=int(budget * (1 - share)) // layout.block_bytes,
        num_slots=max(int(budget * share) // layout.state_bytes, 3),
        block_size=BLOCK_TOKENS,
        eviction=eviction_policy(setting.eviction, attention_tokens(model)),
    )
    policy = checkpoint_policy("none" if is_bound else setting.checkpoints, options.checkpoint_grid_tokens)
    replayed = replay(trace, cache, policy, options.chunk_tokens)
    cache.check()
    return replayed.attention_share if is_bound else replayed.resumed_share


def infinite_share(trace: Trace) -> float:
    """The share of prompt tokens that a cache which forgets nothing and resumes anywhere would not compute."""
    known: set[bytes] = set()
    found = 0
    for prompt in trace.prompts:
        usable = prompt.keys[: (prompt.num_tokens - 1) // BLOCK_TOKENS]
        found += BLOCK_TOKENS * next((i for i, key in enumerate(usable) if key not in known), len(usable))
        known.update(prompt.keys)
    return found / trace.num_tokens


_loaded: dict[tuple[Path, Options], Trace] = {}


def _work(path: Path, options: Options, setting: Setting) -> float:
    """In a worker process, which reads a trace once."""
    if (path, options) not in _loaded:
        _loaded.clear()
        _loaded[path, options] = Trace.read(path, options.limit)
    return hit_share(_loaded[path, options], setting, options)


def settings(shapes: Sequence[str], budgets_gb: Sequence[float], share: float | None) -> list[Setting]:
    """The bound, then every policy with every eviction, for each shape and budget."""
    rows = [(ATTENTION_ONLY, "lru"), ("none", "lru")]  # neither has a checkpoint to order
    policies = [name for name in CHECKPOINT_POLICIES if name != "none"]
    rows += [(checkpoints, eviction) for checkpoints in policies for eviction in EVICTION_POLICIES]
    return [Setting(shape, gb, *row, share) for shape in shapes for gb in budgets_gb for row in rows]


def print_table(name: str, shape: str, found: dict[Setting, float], infinite: float) -> None:
    """One table in Markdown: a row for each policy, a column for each budget."""
    of_shape = {setting: value for setting, value in found.items() if setting.shape == shape}
    budgets = sorted({setting.budget_gb for setting in of_shape})
    print(f"\n{name}, {shape}: % of prompt tokens that need no computing\n")
    print("| checkpoints | eviction | " + " | ".join(f"{gb:g} GB" for gb in budgets) + " |")
    print("|---|---|" + "---:|" * len(budgets))
    for row in dict.fromkeys((setting.checkpoints, setting.eviction) for setting in of_shape):
        values = {s.budget_gb: value for s, value in of_shape.items() if (s.checkpoints, s.eviction) == row}
        is_default = row == (DEFAULT_CHECKPOINT_POLICY, DEFAULT_EVICTION_POLICY)
        mark = "**" if is_default else ""
        cells = " | ".join(f"{mark}{100 * values[gb]:.1f}{mark}" for gb in budgets)
        print(f"| {mark}{row[0]}{mark} | {row[1]} | {cells} |")
    print("| infinite | | " + " | ".join(f"{100 * infinite:.1f}" for _ in budgets) + " |", flush=True)


def plot(path: Path, results: dict[str, tuple[dict[Setting, float], float]]) -> None:
    """A panel for each trace and shape: hit share over the budget, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = sorted({setting.shape for found, _ in results.values() for setting in found}, reverse=True)
    figure, axes = pyplot.subplots(
        len(results), len(shapes), figsize=(5.2 * len(shapes), 3.6 * len(results)), squeeze=False, sharex=True
    )
    colours = {"align": "tab:orange", "every": "tab:red", "branch": "tab:blue"}
    for row, (name, (found, infinite)) in zip(axes, results.items(), strict=True):
        for axis, shape in zip(row, shapes, strict=True):
            lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for setting, value in found.items():
                if setting.shape == shape and setting.checkpoints != "none":
                    key = (setting.checkpoints, setting.eviction)
                    lines.setdefault(key, []).append((setting.budget_gb, 100 * value))
            for (checkpoints, eviction), points in lines.items():
                if checkpoints == ATTENTION_ONLY:
                    axis.plot(*zip(*points, strict=True), color="black", linestyle=":", label="attention only (bound)")
                else:
                    style = "-" if eviction == "flop_aware" else "--"
                    label = f"{checkpoints}, {eviction}"
                    axis.plot(*zip(*points, strict=True), style, color=colours[checkpoints], marker="o", label=label)
            axis.axhline(100 * infinite, color="grey", linewidth=0.8, label="infinite cache (bound)")
            axis.set(xscale="log", ylim=(0, None), title=f"{name.removesuffix('_trace')}, {shape}")
            axis.set_xticks(sorted({setting.budget_gb for setting in found}))
            axis.set_xticklabels([f"{gb:g}" for gb in sorted({setting.budget_gb for setting in found})])
            axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("GB for blocks and states")
    for row in axes:
        row[0].set_ylabel("% of prompt tokens not computed")
    axes[0][-1].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nplot: {path}")


def main(
    trace: Annotated[list[Path], typer.Option(help="Mooncake .jsonl; may be repeated")],
    shape: list[str] = [*SHAPES],  # noqa: B006
    budget_gb: list[float] = [*BUDGETS_GB],  # noqa: B006
    share: Annotated[float | None, typer.Option(help="of the budget, for states; default: the engine's ratio")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="of a prefill step; `align` depends on it")] = 8192,
    grid_tokens: Annotated[int, typer.Option(help="of `branch`")] = CHECKPOINT_GRID_TOKENS,
    limit: Annotated[int | None, typer.Option(help="only the first so many requests")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="write the figure here")] = None,
) -> None:
    """Hit rates of checkpoint and eviction policies on request traces."""
    options = Options(chunk_tokens, grid_tokens, limit)
    for name in shape:
        states = share or state_share(layout_of(name), SHAPES[name].max_position)
        print(f"{name}: {100 * states:.1f} % of the bytes for states")
    results = {}
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for path in trace:
            futures = {each: workers.submit(_work, path, options, each) for each in settings(shape, budget_gb, share)}
            found = {setting: future.result() for setting, future in futures.items()}
            infinite = infinite_share(Trace.read(path, options.limit))
            for name in shape:
                print_table(path.stem, name, found, infinite)
            results[path.stem] = (found, infinite)
    if plot_to:
        plot(plot_to, results)
