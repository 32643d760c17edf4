"""From process start to the first token over HTTP: router, prefill node and decode node on one GPU, without Ray.

    python3 -m benchmarks gpu-start [--shape granite-h-micro] [--weights dummy] [--out DIR]
    python -m benchmarks gpu-start --device cpu --model tiny_models/headrace-tiny-granite-h       # a trial of this file

Cold: Triton's cache is empty, as on a machine's first day. Warm: the same start again, with what the first one
compiled. All three processes start at once; the first request is sent as soon as the router knows both nodes.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.client import RequestFailed, body_of, fresh, stream
from benchmarks.cluster.processes import ClusterFailed, Processes, end_on_sigterm, prefill_and_decode
from benchmarks.shapes import SHAPES, write_shape, write_weights
from benchmarks.timing import table_header, table_row, verdict

REACH_S = 30.0
VLLM_S = 120.0  # granite-h-micro, shared/anchors/h200.md
DEADLINE_S = 150.0  # of one start


@dataclass(frozen=True)
class Start:
    """Seconds since the first process was started."""

    model: str
    weights: str
    cache: str
    ready_s: float
    first_token_s: float

    def __str__(self) -> str:
        vllm = f"{VLLM_S:.0f}" if self.model == "granite-h-micro" else ""
        times = f"{self.ready_s:.1f}", f"{self.first_token_s:.1f}", vllm, f"{REACH_S:.0f}"
        return table_row(self.model, self.weights, self.cache, *times, verdict(self.first_token_s <= REACH_S))


HEADER = table_header(
    "model", "weights", "Triton cache", "nodes registered, s", "first token, s", "vLLM s", "to reach s", ""
)


def measure(model: Path, weights: str, cache: str, triton_cache: Path, engine: dict[str, Any], out: Path) -> Start:
    nodes = prefill_and_decode(engine | {"load_format": weights})
    folder = out / f"start-{model.name}-{weights}-{cache}"
    environment = {"TRITON_CACHE_DIR": str(triton_cache)}
    with Processes(folder, model, nodes, router={"heartbeat_s": 1.0}, environment=environment) as cluster:
        cluster.wait_ready(cluster.started_s + DEADLINE_S)
        ready_s = time.perf_counter() - cluster.started_s
        answer = asyncio.run(stream(cluster.url, body_of(fresh(500, seed=0), 4), 4, DEADLINE_S))
        assert answer.usage["headrace"]["path"] == "remote"
    return Start(model.name, weights, cache, ready_s, answer.arrivals[0] - cluster.started_s)


def engine_settings(device: str, cache_gib: float) -> dict[str, Any]:
    """Two nodes share the device, so each is given its part of the memory."""
    settings: dict[str, Any] = {"device": device, "cache_bytes": int(cache_gib * 2**30), "max_running": 64}
    if device == "cpu":
        return {**settings, "threads": 1, "max_model_tokens": 2048}
    return {**settings, "state_dtype": "bfloat16", "max_step_tokens": 8192, "max_model_tokens": 32768}


def models(shapes: Sequence[str], weights: Sequence[str], device: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Model folders and how their weights are loaded."""
    for name in shapes:
        path = write_shape(SHAPES[name], folder / name)
        for each in weights:
            if each == "safetensors":
                write_weights(path, device)
            yield path, each
        shutil.rmtree(path)  # gigabytes


def main(
    shape: list[str] = ["granite-h-micro", "qwen35-4b"],  # noqa: B006
    weights: list[str] = ["dummy", "safetensors"],  # noqa: B006
    model: Path | None = None,
    device: str = "cuda:0",
    cache_gib: float = 20.0,
    out: Path | None = None,
) -> None:
    """Process start to first token; `model`, a checkpoint's folder, replaces the shapes; `out` keeps the logs."""
    end_on_sigterm()
    starts = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path, load in [(model, "safetensors")] if model else models(shape, weights, device, folder):
            triton_cache = folder / f"triton-{path.name}-{load}"
            for cache in ("cold", "warm"):
                try:
                    engine = engine_settings(device, cache_gib)
                    starts.append(measure(path, load, cache, triton_cache, engine, out or folder / "runs"))
                except (ClusterFailed, RequestFailed, TimeoutError) as error:  # the other starts are still worth it
                    print(f"{path.name}, {load}, {cache}: {type(error).__name__}: {error}", flush=True)
                    continue
                print(starts[-1], flush=True)
    print("\n".join(["", HEADER, *map(str, starts)]), flush=True)
