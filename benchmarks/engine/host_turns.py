"""The host's part of a decode node's turns, at one or more commits of this repository. No GPU: nothing is computed.

    python -m benchmarks engine-host [COMMIT ...] [--chats 54] [--rounds 5]

Chats decode in the whole engine of a tiny model, whose passes are captured and whose replays do nothing; when an answer
ends, the chat's next turn comes with its history in the cache. Of the turns with decodes alone the time of the tenth is
shown that was quickest, by part, in microseconds; copies to a GPU, and waiting for it and for other threads, come on
top. A commit is `.` for the working tree; several are run in turn, in alternating order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from typing import Annotated

import typer

from benchmarks.router.commits import ROOT, tree_of
from benchmarks.timing import table_header, table_row

PARTS = {
    "schedule": "_schedule",
    "launch": "_try_launch",
    "take": "_take_tokens",
    "publish": "_publish_written",
    "report": "_report_taken",
}
ROUND_TIMEOUT_S = 300.0
ENGINE = """
import json, random, sys, time
from collections import defaultdict
from dataclasses import dataclass

import torch

import headrace.engine.build as build
from benchmarks.engine.steps import greedy, job_of, sequence_of
from benchmarks.shapes import TINY_MODELS
from headrace.cache.hits import ResumeLocally
from headrace.engine.config import EngineConfig
from headrace.engine.graphs.captured_passes import Captured
from headrace.engine.runner import ModelRunner
from headrace.engine.sequence import Finished
from headrace.models.logits import Logits
from headrace.models.weights import load_model

CHATS, FIRST, NEW, ANSWER, PARTS = json.loads(sys.argv[1])
TURNS, MOST_TURNS, LONGEST = 10, 400, 32768


class HostRunner(ModelRunner):
    def __init__(self, model, memory):
        super().__init__(model, memory)
        self.model = NoModel(model)
        capture = lambda work: Captured(lambda: None, work())
        with torch.inference_mode():
            self.capture_decodes(64, LONGEST, capture)
            self.capture_prefills(8192, LONGEST, capture)
            self.capture_mixes(capture)

    def _decode(self, batch):
        return self._logit_rows(batch)

    def forward(self, inputs):
        return Logits(torch.zeros(sum(entry.num_logits for entry in inputs), self.model.config.vocab_size), 1.0)

    def write_states(self, states):
        pass


class NoModel:
    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, memory, out=None):
        return Logits(torch.zeros(512, self.config.vocab_size), 1.0)


class Chat:
    def __init__(self, engine, number):
        self._engine, self._random, self._sequence = engine, random.Random(number), None
        self._begin()

    def _begin(self):
        self._history, self._num_turns, self.is_done = self._drawn(FIRST), 0, True

    def _drawn(self, count):
        return [self._random.randrange(3, 500) for _ in range(count)]

    def next_turn(self, max_tokens=ANSWER):
        if self._sequence is not None:
            self._engine.release(self._sequence)
        if self._num_turns == TURNS:
            self._begin()
        self._history += self._drawn(NEW if self._num_turns else 0)
        self._num_turns += 1
        self.is_done = False
        job = job_of(greedy(self._history, max_tokens), max_tokens, ResumeLocally(), self._on_event)
        self._sequence = sequence_of(self._engine, job)
        self._engine.submit(self._sequence)

    def _on_event(self, event):
        self.is_done = self.is_done or isinstance(event, Finished)


def main():
    torch.set_num_threads(1)
    build.ModelRunner = HostRunner
    config = EngineConfig(cache_bytes=4 << 30, max_step_tokens=8192, max_running=64, threads=1, overlap=True,
                          max_model_tokens=LONGEST)
    engine = build.engine_around(load_model(TINY_MODELS / "headrace-tiny-granite-h"), config, time.monotonic).engine
    spent = defaultdict(float)

    def timed(name, work):
        def run(*args):
            began_s = time.perf_counter()
            try:
                return work(*args)
            finally:
                spent[name] += time.perf_counter() - began_s
        return run

    for name, method in PARTS.items():
        setattr(engine, method, timed(name, getattr(engine, method)))
    chats = [Chat(engine, number) for number in range(CHATS)]
    for number, chat in enumerate(chats):  # so that they do not end together
        chat.next_turn(1 + number * ANSWER // CHATS)
    print(flush=True)
    for line in sys.stdin:
        turns = []
        while len(turns) < MOST_TURNS:
            begun = [chat for chat in chats if chat.is_done]
            for chat in begun:
                chat.next_turn()
            spent.clear()
            began_s = time.perf_counter()
            engine.admit(engine.host_share_s)
            engine.step()
            whole_s = time.perf_counter() - began_s
            if not any(sequence.is_prefilling for sequence in engine.sequences):
                turns.append(dict(spent, turn=whole_s))
        print(json.dumps(turns), flush=True)


main()
"""


class Engine:
    """One commit's engine, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()

    def turns(self) -> list[dict[str, float]]:
        """Seconds of turns with decodes alone, whole and by part."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        turns: list[dict[str, float]] = json.loads(self._read())
        return turns

    def _read(self) -> str:
        assert self._process.stdout is not None
        limit = Timer(ROUND_TIMEOUT_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"an engine's process has failed, see above, or not answered for {ROUND_TIMEOUT_S:g} s")
        return line


@contextmanager
def engine_of(commit: str, loads: list[object]) -> Iterator[Engine]:
    with ExitStack() as stack:
        tree = ROOT if commit == "." else stack.enter_context(tree_of(commit))
        pipe = subprocess.PIPE
        environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", ENGINE, json.dumps(loads)]
        process = stack.enter_context(
            subprocess.Popen(command, cwd=tree, env=environment, stdin=pipe, stdout=pipe, text=True)
        )
        stack.callback(process.kill)
        yield Engine(process)


def quickest_tenth_us(turns: list[dict[str, float]], part: str) -> float:
    """Microseconds of the part, at the tenth percentile of the turns."""
    seconds = sorted(turn.get(part, 0.0) for turn in turns)
    return 1e6 * seconds[len(seconds) // 10]


def main(
    commit: Annotated[list[str] | None, typer.Argument()] = None,
    chats: int = 54,
    first: Annotated[int, typer.Option(help="tokens of a chat's first prompt")] = 14336,
    new: Annotated[int, typer.Option(help="new tokens of a later one")] = 964,
    answer: Annotated[int, typer.Option(help="tokens of an answer")] = 300,
    rounds: int = 5,
) -> None:
    """The host's part of a decode node's turns."""
    commits = commit or ["."]
    with ExitStack() as stack:
        loads = [chats, first, new, answer, PARTS]
        engines = [stack.enter_context(engine_of(each, loads)) for each in commits]
        turns: list[list[dict[str, float]]] = [[] for _ in engines]
        for number in range(rounds + 1):
            for index in range(len(engines))[:: 1 if number % 2 else -1]:
                new_turns = engines[index].turns()
                if number:  # the first round warms up
                    turns[index] += new_turns
    print(f"{chats} chats, microseconds of a turn with decodes alone\n")
    print(table_header("commit", "turn", "ratio", *PARTS))
    first_us = quickest_tenth_us(turns[0], "turn")
    for each, of_commit in zip(commits, turns, strict=True):
        turn_us = quickest_tenth_us(of_commit, "turn")
        parts = [f"{quickest_tenth_us(of_commit, part):.0f}" for part in PARTS]
        print(table_row(each, f"{turn_us:.0f}", f"{turn_us / first_us:.2f}", *parts))
