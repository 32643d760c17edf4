"""From process start to the first token over HTTP: router, prefill node and decode node on one GPU, without Ray.

    python3 -m benchmarks gpu-start [--shape granite-h-micro qwen35-4b] [--weights dummy safetensors] [--out DIR]
    python -m benchmarks gpu-start --device cpu --model tiny_models/headrace-tiny-granite-h       # a trial of this file

Cold: Triton's cache is empty, as on a machine's first day. Warm: the same start again, with what the first one
compiled. All three processes start at once; the first request is sent as soon as the router knows both nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ClusterFailed, Processes, end_on_sigterm
from benchmarks.shape_folder import write_shape, write_weights
from benchmarks.shapes import SHAPES
from benchmarks.streaming import RequestFailed, body_of, stream

REACH_S = 30.0
VLLM_S = 120.0  # granite-h-micro, shared/anchors/h200.md
DEADLINE_S = 150.0  # of one start
PROMPT_TOKENS = 500
PROGRESS = ("warm-up", "compiled", "decode graph", "prefill graph", "weights", "serves at")


@dataclass(frozen=True)
class Start:
    """Seconds since the first process was started."""

    model: str
    weights: str
    cache: str
    ready_s: float
    first_token_s: float

    def __str__(self) -> str:
        verdict = "met" if self.first_token_s <= REACH_S else "missed"
        vllm = f"{VLLM_S:.0f}" if self.model == "granite-h-micro" else ""
        return (
            f"| {self.model} | {self.weights} | {self.cache} | {self.ready_s:.1f} | {self.first_token_s:.1f} "
            f"| {vllm} | {REACH_S:.0f} | {verdict} |"
        )


HEADER = (
    "| model | weights | Triton cache | nodes registered, s | first token, s | vLLM s | to reach s | |\n"
    "|---|---|---|---:|---:|---:|---:|---|"
)


def measure(model: Path, weights: str, cache: str, triton_cache: Path, options: argparse.Namespace) -> Start:
    engine = engine_settings(options, weights)
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "p0": ("prefill", {"engine": engine}),
        "d0": ("decode", {"engine": engine, "local_prefill": {"max_tokens": 0}}),
    }
    folder = options.out / f"start-{model.name}-{weights}-{cache}"
    prompt = random.Random(0).choices(range(300, 4000), k=PROMPT_TOKENS)
    environment = {"TRITON_CACHE_DIR": str(triton_cache)}
    with Processes(folder, model, nodes, router={"heartbeat_s": 1.0}, environment=environment) as cluster:
        cluster.wait_ready(cluster.started_s + DEADLINE_S)
        ready_s = time.perf_counter() - cluster.started_s
        answer = asyncio.run(stream(cluster.url, body_of(prompt, 4), 4, DEADLINE_S))
        first_token_s = answer.arrivals[0] - cluster.started_s
        for name in nodes:
            for line in cluster.log_lines(name, PROGRESS):
                print(f"  {name}: {line}", flush=True)
        assert answer.usage["headrace"]["path"] == "remote"
    return Start(model.name, weights, cache, ready_s, first_token_s)


def engine_settings(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    """Two nodes share the device, so each is told what of its memory is its own."""
    settings: dict[str, Any] = {
        "device": options.device,
        "load_format": weights,
        "cache_bytes": int(options.cache_gib * 2**30),
        "max_running": 64,
        "max_model_tokens": 32768,
    }
    if options.device == "cpu":
        return {**settings, "threads": 1, "max_model_tokens": 2048}
    return {**settings, "state_dtype": "bfloat16", "max_step_tokens": 8192}


def models(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Path, str]]:
    """Folders and how their weights are loaded."""
    if options.model is not None:
        yield options.model, "safetensors"
        return
    for name in options.shape:
        path = write_shape(SHAPES[name], folder / name)
        for weights in options.weights:
            if weights == "safetensors":
                write_weights(path, options.device)
            yield path, weights
        shutil.rmtree(path)  # gigabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["granite-h-micro", "qwen35-4b"])
    parser.add_argument("--weights", nargs="+", choices=["dummy", "safetensors"], default=["dummy", "safetensors"])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder, instead of shapes")
    parser.add_argument("--device", default="cuda:0", help="of both nodes")
    parser.add_argument("--cache-gib", type=float, default=20.0, help="blocks and states of each node")
    parser.add_argument("--out", type=Path, help="where settings and logs stay")
    options = parser.parse_args()
    end_on_sigterm()
    starts = []
    with tempfile.TemporaryDirectory() as scratch:
        options.out = options.out or Path(scratch) / "runs"
        for model, weights in models(options, Path(scratch)):
            triton_cache = Path(scratch) / f"triton-{model.name}-{weights}"
            for cache in ("cold", "warm"):
                try:
                    starts.append(measure(model, weights, cache, triton_cache, options))
                except (ClusterFailed, RequestFailed, TimeoutError) as error:  # the other starts are still worth it
                    print(f"{model.name}, {weights}, {cache}: {type(error).__name__}: {error}", flush=True)
                    continue
                print(starts[-1], flush=True)
    print("\n".join(["", HEADER, *map(str, starts)]), flush=True)


if __name__ == "__main__":
    main()
