"""The share of requests within Mooncake's bounds as a trace comes faster: a row for each workload and arrangement, a
column for each bound of the gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.router.report import FIRST_TOKEN_S, GAPS_S, Result


def plot(path: Path, runs: Iterable[tuple[str, str, float, Result]]) -> None:
    """Writes the figure; `runs`: row, policy, speed and what came of it."""
    from matplotlib.figure import Figure

    rows: dict[str, dict[str, list[tuple[float, Result]]]] = defaultdict(lambda: defaultdict(list))
    for row, policy, speed, result in runs:
        rows[row][policy].append((speed, result))
    figure = Figure((4.2 * len(GAPS_S), 3.4 * len(rows)), layout="tight")
    axes = figure.subplots(len(rows), len(GAPS_S), squeeze=False)
    for across, (row, policies) in zip(axes, rows.items(), strict=True):
        for number, (axis, gap_s) in enumerate(zip(across, GAPS_S, strict=True)):
            for policy, points in policies.items():
                speeds, results = zip(*sorted(points, key=lambda point: point[0]), strict=True)
                axis.plot(speeds, [100 * each.goodput[number] for each in results], marker="o", label=policy)
            axis.set(title=f"{row}: {1000 * gap_s:.0f} ms", ylim=(0, 102))
    axes[0][0].legend(fontsize="small", loc="lower left")
    figure.supxlabel("times faster than recorded")
    figure.supylabel(f"% of requests: {FIRST_TOKEN_S:.0f} s, and the gap")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\nplot: {path}")
