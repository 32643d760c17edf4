"""One prefill and one decode node on two GPUs, over HTTP, beside one GPU that does both, in one run.

    python3 -m benchmarks gpu-cluster [--devices cuda:0 cuda:1] [--only TTFT] [--out DIR]
    python -m benchmarks gpu-cluster --devices cpu cpu --model tiny_models/headrace-tiny-granite-h --scale 16  # trial

The rows of shared/anchors/h200.md that a whole cluster answers: granite-h-micro with random weights in bfloat16,
prompts of token ids, streamed answers. Two clusters run at the same time and take turns: `pair` (prefill on the first
device, decode on the second) and `one` (a decode node on the second device that no prefill node helps). After them
`fetching-by-default`, the same pair with the default `fetch_from_others`, chats alone. Above the table stand all
settings that differ from the defaults.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cluster.client import Answer, Client, Load, RequestFailed, fresh
from benchmarks.cluster.processes import ClusterFailed, NodeSettings, Processes, end_on_sigterm
from benchmarks.shapes import SHAPES, write_shape
from benchmarks.timing import table_header, table_row, verdict

START_TIMEOUT_S = 150.0
WARM_UPS, ROUNDS = 2, 7
BLOCK = 16
ROUTER = {"max_concurrent": 256, "heartbeat_s": 1.0, "roles": "fixed"}
BY_DEFAULT = "fetching-by-default"
HEADER = table_header("work", "one GPU", "1 prefill + 1 decode", "vLLM 0.26: one / 1P1D", "to reach", "")


@dataclass(frozen=True)
class Row:
    """`one` and `pair` are ours, `vllm` one GPU's and 1P1D's where the anchor knows them; `met` None: nothing asked."""

    work: str
    one: str
    pair: str
    vllm: str = ""
    reach: str = ""
    met: bool | None = None

    def __post_init__(self) -> None:
        print(self, flush=True)

    def __str__(self) -> str:
        return table_row(self.work, self.one, self.pair, self.vllm, self.reach, verdict(self.met))


Measure = Callable[[], Awaitable[Sequence[Row]]]


class Bench:
    """The rows, each a coroutine. `scale` divides the longer lengths: to try this file on a CPU."""

    def __init__(self, one: Client, pair: Client, scale: int) -> None:
        self.one = one
        self.pair = pair
        self.scale = scale

    def rows(self) -> list[tuple[str, Measure]]:
        """Names and measurements, in the order of the anchor."""
        load_64 = "13.6 req/s, ITL 31.5 / 18.0 req/s, TTFT 2,798 ms, ITL 4.08"
        return [
            ("TTFT 2,048", lambda: self.first_tokens(2048, 5, "63 / 197 ms")),
            ("TTFT 8,192", lambda: self.first_tokens(8192, 10, "117 / 235 ms")),
            ("TTFT 32,768", lambda: self.first_tokens(32768, 20, "485 / 641 ms")),
            ("again 8,192", self.again),
            ("load 16", lambda: self.load(16, 160, 20.0, "16.5 req/s, TTFT 407 ms, ITL 3.61 ms")),
            ("load 64", lambda: self.load(64, 320, 22.0, load_64)),
            ("shared 300 + 100", lambda: self.shared(300, 100, 4, "0 / 0")),
            ("shared 4,096 + 4,096", lambda: self.shared(4096 // self.scale, 4096 // self.scale, 1, "3,840")),
            ("chat", self.chat),
        ]

    async def first_tokens(self, num_tokens: int, more_ms: float, vllm: str) -> list[Row]:
        """Time to the first token; at 8,192 tokens also the second token's wait."""
        length = num_tokens // self.scale
        answers: dict[Client, list[Answer]] = {self.one: [], self.pair: []}
        for n in range(WARM_UPS + ROUNDS):
            for client in answers:
                answers[client].append(await client.ask(fresh(length, num_tokens * 100 + n), 8))
        one, pair = (_median_ms(a.first_token_s for a in each[WARM_UPS:]) for each in answers.values())
        reach = one + more_ms
        rows = [Row(f"TTFT, {length:,}", _ms(one), _ms(pair), vllm, f"<= {_ms(reach)}", pair <= reach)]
        if num_tokens == 8192:
            second = [_median_ms(a.gaps_s[0] for a in each[WARM_UPS:]) for each in answers.values()]
            name = f"second token behind the first, {length:,}"
            rows.append(Row(name, _ms(second[0]), _ms(second[1]), "", "<= 15 ms", second[1] <= 15))
        reports = [a.usage["headrace"]["transfer"] for a in answers[self.pair][WARM_UPS:]]
        print(f"  transfer of {length:,}: {_median_ms(r['seconds'] for r in reports):.1f} ms a session", flush=True)
        return rows

    async def again(self) -> list[Row]:
        length, times = 8192 // self.scale, []
        for client in (self.one, self.pair):
            answers = [answer for seed in range(3) for answer in await client.again(length, 2, seed)]
            times.append(_median_ms(answer.first_token_s for answer in answers))
            cached = sorted({answer.cached_tokens for answer in answers})
            print(f"  again {length:,}: cached {cached}, {answers[-1].usage['headrace']['path']}", flush=True)
        one, pair = times
        name = f"TTFT, {length:,}, the same prompt again"
        return [Row(name, _ms(one), _ms(pair), "65 / 110 ms", "<= 25 ms", pair <= 25)]

    async def load(self, at_once: int, total: int, least: float, vllm: str) -> list[Row]:
        length, total = 4096 // self.scale, max(total // self.scale, at_once)
        one = await self.one.load(length, 128, at_once, max(total // 2, at_once), seed=at_once)
        pair = await self.pair.load(length, 128, at_once, total, seed=at_once)
        reach, met = f">= {least:.0f} req/s", pair.requests_a_s >= least
        if at_once == 16:
            reach += ", TTFT <= 300 ms, ITL <= 3 ms"
            met = met and pair.first_token_p50_s <= 0.3 and pair.gap_p50_s <= 0.003
        return [Row(f"{length:,} in, 128 out, {at_once} at a time", _load(one), _load(pair), vllm, reach, met)]

    async def shared(self, shared: int, new: int, times: int, vllm: str) -> list[Row]:
        reach = shared // BLOCK * BLOCK
        one = await self.one.sharers(shared, new, times, seed=shared)
        pair = await self.pair.sharers(shared, new, times, seed=shared)
        name = f"cached of {shared:,} shared + {new:,} new, from the 2nd request on"
        return [Row(name, _numbers(one), _numbers(pair), vllm, f">= {reach:,}", min(pair) >= reach)]

    async def chat(self) -> list[Row]:
        one, pair = [await ask_chat(client) for client in (self.one, self.pair)]
        met = all(cached >= before - BLOCK for cached, before in pair)
        reach = "every earlier turn but its last 16: " + _numbers([before - BLOCK for _, before in pair])
        vllm = "768, 768, 1,536, 1,536"
        return [Row("cached in turns 2 to 5 of a chat", _cached(one), _cached(pair), vllm, reach, met)]


async def ask_chat(client: Client) -> list[tuple[int, int]]:
    """Each turn but the first of a chat: its cached tokens, and the length of the whole turn before it."""
    new = 200
    answered = await client.chat(1000, new, 64, 5, seed=7)
    for turn, (length, answer) in enumerate(answered):
        print(f"  turn {turn + 1} of {length:,}: {1e3 * answer.first_token_s:.1f} ms", flush=True)
    return [(answer.cached_tokens, length - new) for length, answer in answered[1:]]


async def chat_by_default(client: Client) -> list[Row]:
    return [Row("the same, `fetch_from_others` as by default", "", _cached(await ask_chat(client)))]


def _median_ms(seconds: Any) -> float:
    return 1e3 * statistics.median(seconds)


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def _cached(chat: Sequence[tuple[int, int]]) -> str:
    return _numbers([cached for cached, _ in chat])


def _load(load: Load) -> str:
    first, gap = 1e3 * load.first_token_p50_s, 1e3 * load.gap_p50_s
    return f"{load.requests_a_s:.1f} req/s, TTFT {first:.0f} ms, ITL {gap:.2f} ms"


async def run_rows(measures: Sequence[tuple[str, Measure]]) -> list[Row]:
    """The rows measured; one that fails is reported as such, and the others go on."""
    rows: list[Row] = []
    for name, measure in measures:
        try:
            rows += await measure()
        except (RequestFailed, TimeoutError, OSError, ExceptionGroup) as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            rows.append(Row(name, "", f"failed: {type(cause).__name__} {cause}", met=False))
    return rows


# ------------------------------------------------------------ the clusters


def node_settings(device: str, cache_gib: float) -> dict[str, Any]:
    engine: dict[str, Any] = {"device": device, "cache_bytes": int(cache_gib * 2**30), "max_running": 64}
    if device == "cpu":
        return {"engine": {**engine, "threads": 1}}
    engine |= {"load_format": "dummy", "state_dtype": "bfloat16", "max_step_tokens": 8192, "max_model_tokens": 36864}
    return {"engine": engine, "staging_buffers": 8, "max_message_bytes": 64 << 20}


def cluster_settings(devices: tuple[str, str], cache_gib: float, with_default: bool) -> dict[str, NodeSettings]:
    """Each cluster's nodes, by the cluster's name."""
    first, second = (node_settings(device, cache_gib) for device in devices)
    # So few tokens of an answer are computed sooner than fetched; what counts is that no node computes them.
    fetching = first | {"fetch_from_others": {"max_time_ratio": 1000.0}}
    return {
        "one": {"s0": ("decode", second)},
        "pair": {"p0": ("prefill", fetching), "d0": ("decode", second)},
        **({BY_DEFAULT: {"p0": ("prefill", first), "d0": ("decode", second)}} if with_default else {}),
    }


def settings_table(clusters: Mapping[str, NodeSettings]) -> str:
    """A Markdown table of every setting that differs from its default."""
    lines = ["Settings; all others are the defaults.", "", table_header("cluster", "process", "settings")]
    lines.append(table_row("each", "router", _flat(ROUTER)))
    for cluster, nodes in clusters.items():
        lines += [table_row(cluster, f"{name}, {role}", _flat(given)) for name, (role, given) in nodes.items()]
    return "\n".join(lines)


def _flat(given: Mapping[str, Any], above: str = "") -> str:
    return ", ".join(
        _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else f"{above}{key} {value}"
        for key, value in given.items()
    )


def measure(
    model: Path, folder: Path, clusters: Mapping[str, NodeSettings], scale: int, only: str, deadline_s: float
) -> list[Row]:
    def start(stack: ExitStack, *names: str) -> list[Processes]:
        """Starts clusters at once; returns when they are ready."""
        started = [
            stack.enter_context(Processes(folder / name, model, clusters[name], router=ROUTER)) for name in names
        ]
        for cluster in started:
            cluster.wait_ready(min(deadline_s, cluster.started_s + START_TIMEOUT_S))
        print(f"{', '.join(names)} ready after {time.perf_counter() - started[0].started_s:.1f} s", flush=True)
        return started

    with ExitStack() as stack:
        one, pair = start(stack, "one", "pair")
        bench = Bench(Client(one.url, deadline_s), Client(pair.url, deadline_s), scale)
        rows = asyncio.run(run_rows([row for row in bench.rows() if only in row[0]]))
        print("links:", pair.cluster().get("links"), flush=True)
    if BY_DEFAULT in clusters:
        try:
            with ExitStack() as stack:
                (cluster,) = start(stack, BY_DEFAULT)
                client = Client(cluster.url, deadline_s)
                rows += asyncio.run(run_rows([("chat", lambda: chat_by_default(client))]))
        except ClusterFailed as error:  # the other rows are worth having
            print(f"{BY_DEFAULT}: {error}", flush=True)
    return rows


def main(
    devices: Annotated[tuple[str, str], typer.Option(help="of prefill and of decode")] = ("cuda:0", "cuda:1"),
    shape: str = "granite-h-micro",
    model: Annotated[Path | None, typer.Option(help="a checkpoint's folder, instead of a shape")] = None,
    cache_gib: Annotated[float, typer.Option(help="blocks and states of each node")] = 40.0,
    scale: Annotated[int, typer.Option(help="divides the longer prompts: a trial of this file")] = 1,
    only: Annotated[str, typer.Option(help="rows whose name has this in it")] = "",
    deadline: Annotated[float, typer.Option(help="seconds for everything")] = 480.0,
    out: Annotated[Path | None, typer.Option(help="where the table, settings and logs stay")] = None,
) -> None:
    """A prefill and a decode GPU over HTTP beside one GPU that does both."""
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        clusters = cluster_settings(devices, cache_gib, with_default=only in "chat")
        path = model or write_shape(SHAPES[shape], Path(scratch) / shape)
        rows = measure(path, folder, clusters, scale, only, time.perf_counter() + deadline)
        table = "\n".join([settings_table(clusters), "", HEADER, *map(str, rows)])
        (folder / "table.md").write_text(f"{table}\n")
        print(f"\n{table}", flush=True)
