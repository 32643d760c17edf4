"""A long prompt's way through the event loops of router and node, and what prompts in flight cost garbage collections.

    python -m benchmarks prompt-path [--tokens 16384] [--rounds 60] [--prompts 64]

The router's part begins with the bytes of a parsing process's answer and ends with those of both calls, the node's
begins with these bytes and ends with a sequence that can be queued; HTTP, gRPC and the choice of nodes are left out.
Printed are the whole work and the longest part of it between two turns of the loop, each the best round, as other work
on the machine only ever adds to it. Then all prompts stay alive, in a process that started as a server does, and full
collections are timed.
"""

from __future__ import annotations

import gc
import pickle
import random
import time
from collections.abc import Callable, Generator
from typing import Annotated

import typer

from benchmarks.timing import best_s, table_header, table_row
from headrace.cache.hashing import PrefixHasher
from headrace.cache.hits import ResumeLocally
from headrace.engine.intake import Intake
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Job, Sequence
from headrace.grammar import Grammars
from headrace.pauses import keep_pauses_short
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb
from router.requests.lifecycle import RequestLifecycle

BLOCK_TOKENS, VOCAB_SIZE, MOST = 16, 100_352, 1 << 30
COLLECTIONS = 10
INTAKE = Intake(
    StopRules((0,), MOST), Grammars(None, VOCAB_SIZE, (0,)), BLOCK_TOKENS, num_blocks=MOST, vocab_size=VOCAB_SIZE
)

Parts = Generator[None, None, object]
"""Work of an event loop, which has other turns where this yields; returns what stays alive of it."""


def prompt(num_tokens: int, seed: int) -> Request:
    ids = random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)
    return Request(f"r{seed}", TokenArray.of(ids), num_tokens, Sampling(100, seed), salt=b"tenant")


def in_router(parsed: bytes) -> Parts:
    """From a parsing process's answer to both calls."""
    request: Request = pickle.loads(parsed)
    life = RequestLifecycle(request, max_attempts=3, now_s=0.0)
    yield
    hasher = PrefixHasher(BLOCK_TOKENS, request.salt)
    for _ in hasher.extend_in_parts(request.tokens):
        yield
    yield
    decode_call(life.shown.request_so_far)
    yield
    codecs.encode(m.PrefillRequest(life.shown.request_so_far), pb.PrefillRequest()).SerializeToString()
    return life, hasher.keys


def in_node(sent: bytes) -> Parts:
    """From a call to its sequence, which could be queued."""
    start = codecs.decode_one_of(pb.DecodeCommand.FromString(sent))
    sequence: Sequence = INTAKE.sequence(Job(start.request, lambda hit: ResumeLocally(), 100, time.monotonic(), print))
    yield
    for _ in INTAKE.hash_prompt(sequence):
        yield
    return sequence


def decode_call(request: Request) -> bytes:
    return codecs.encode_one_of(m.Start(request, True), pb.DecodeCommand()).SerializeToString()


def part_times(parts: Parts) -> list[float]:
    times: list[float] = []
    while True:
        began_s = time.perf_counter()
        try:
            next(parts)
        except StopIteration:
            return [*times, time.perf_counter() - began_s]
        times.append(time.perf_counter() - began_s)


def kept(parts: Parts) -> object:
    """The value that the work leaves behind when all of it is done."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            return done.value


def main(
    tokens: Annotated[int, typer.Option(help="length of each prompt")] = 16_384,
    rounds: Annotated[int, typer.Option(help="of which the best is printed")] = 60,
    prompts: Annotated[int, typer.Option(help="kept alive while garbage is collected")] = 64,
) -> None:
    """Event-loop time of a long prompt in router and node, and garbage collections beside many."""
    keep_pauses_short()
    print(table_header("", "bytes in", "ms", "longest part, ms", f"full collection with {prompts} alive, ms"))
    ways: tuple[tuple[str, Callable[[bytes], Parts], Callable[[Request], bytes]], ...] = (
        ("router", in_router, pickle.dumps),
        ("node", in_node, decode_call),
    )
    for name, way, bytes_in in ways:
        data = bytes_in(prompt(tokens, 0))
        times = [part_times(way(data)) for _ in range(rounds)]
        alive = [kept(way(bytes_in(prompt(tokens, seed)))) for seed in range(prompts)]
        gc.collect()
        collection_s = best_s(gc.collect, COLLECTIONS)
        del alive
        seconds = (min(map(sum, times)), min(map(max, times)), collection_s)
        print(table_row(name, f"{len(data):,}", *(f"{1e3 * each:.2f}" for each in seconds)))
