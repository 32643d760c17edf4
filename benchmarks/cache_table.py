"""What checkpoint and eviction policies are worth on real request traces: share of prompt tokens not computed.

    python -m benchmarks.cache_table --trace FILE [--trace FILE ...] [--plot PNG]

One prefill node's cache, with the bytes of a real model's blocks and states; see benchmarks/cache_replay.py for
what is assumed. Two bounds stand beside the policies: all bytes for attention blocks, as if states were free
(`attention only`), and a cache that never forgets (`infinite`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cache_replay import BLOCK_TOKENS, Trace, replay
from benchmarks.shapes import SHAPES
from headrace.cache.checkpoints import (
    CHECKPOINT_GRID_TOKENS,
    CHECKPOINT_POLICIES,
    DEFAULT_CHECKPOINT_POLICY,
    checkpoint_policy,
)
from headrace.cache.eviction import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES, eviction_policy
from headrace.cache.layout import CacheLayout
from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.config import state_share
from headrace.models.flops import attention_tokens

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
    """Of the trace's prompt tokens; for the bound, those that attention blocks match."""
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
    """What a cache that forgets nothing, and resumes anywhere, would not compute."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True, help="Mooncake .jsonl; may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="default: all")
    parser.add_argument("--budget-gb", type=float, action="append", help=f"default: {BUDGETS_GB}")
    parser.add_argument("--share", type=float, help="of the budget, for states; default: the engine's own ratio")
    parser.add_argument("--chunk-tokens", type=int, default=8192, help="of a prefill step; `align` depends on it")
    parser.add_argument("--checkpoint-grid-tokens", type=int, default=CHECKPOINT_GRID_TOKENS, help="of `branch`")
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--plot", type=Path, help="write the figure here")
    args = parser.parse_args()
    options = Options(args.chunk_tokens, args.checkpoint_grid_tokens, args.limit)
    shapes = args.shape or list(SHAPES)
    for shape in shapes:
        share = args.share or state_share(layout_of(shape), SHAPES[shape].max_position)
        print(f"{shape}: {100 * share:.1f} % of the bytes for states")
    results = {}
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for path in args.trace:
            todo = settings(shapes, args.budget_gb or BUDGETS_GB, args.share)
            futures = {setting: workers.submit(_work, path, options, setting) for setting in todo}
            found = {setting: future.result() for setting, future in futures.items()}
            infinite = infinite_share(Trace.read(path, options.limit))
            for shape in shapes:
                print_table(path.stem, shape, found, infinite)
            results[path.stem] = (found, infinite)
    if args.plot:
        plot(args.plot, results)


if __name__ == "__main__":
    main()
