"""The share of requests within Mooncake's bounds as a trace comes faster, a panel for each workload and arrangement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.router.report import GAPS_S, Result

PLOTTED_GAP_S = 0.1


def plot(path: Path, runs: Iterable[tuple[str, str, float, Result]]) -> None:
    """Writes the figure; `runs`: panel, policy, speed and what came of it."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for panel, policy, speed, result in runs:
        panels[panel][policy].append((speed, 100 * result.goodput[GAPS_S.index(PLOTTED_GAP_S)]))
    figure = Figure((5.2 * len(panels), 3.6), layout="tight")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (panel, policies) in zip(axes, panels.items(), strict=True):
        for policy, points in policies.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=policy)
        axis.set(title=panel, ylim=(0, 102))
    axes[-1].legend(fontsize="small", loc="lower left")
    figure.supxlabel("times faster than recorded")
    figure.supylabel(f"% of requests: 30 s, {1000 * PLOTTED_GAP_S:.0f} ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nplot: {path}")
