"""Host work for a prompt of token ids whose prefix is cached whole: milliseconds a stage, in order.

    python -m benchmarks host-overhead [--tokens 8192] [--rounds 30]

Router, decode node and prefill node in one process and one thread: HTTP, gRPC and threads that wake each other are left
out. Best round of each stage, as other work on the machine only ever adds to it. No forward pass runs in the measured
rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from benchmarks.cluster.client import body_of, fresh
from benchmarks.engine.steps import Batch, job_of, sequence_of
from benchmarks.shapes import TINY_MODELS
from benchmarks.timing import table_header, table_row
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import HitPolicy, ReceiveState, ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Sequence
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.sequence_input import SequenceInput
from headrace.request import Request
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb
from router.api.body_schemas import parse_body
from router.api.completion_schemas import CompletionBody
from router.api.generation import RequestBuilder
from router.text.tokens import ModelTokens

MODEL = TINY_MODELS / "headrace-tiny-granite-h"
CACHE_BYTES = 256 << 20
T = TypeVar("T")


class Stages:
    """Times stages under their names and keeps the best time of each."""

    def __init__(self) -> None:
        self.best_ms: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        result = work()
        taken_ms = 1e3 * (time.perf_counter() - began_s)
        self.best_ms[name] = min(taken_ms, self.best_ms.get(name, taken_ms))
        return result


class Node:
    """An engine that has prefilled the prompt once; `hit_policy` is that of its role."""

    def __init__(self, name: str, built: BuiltEngine, hit_policy: HitPolicy) -> None:
        self.name = name
        self._engine = built.engine
        self._block_size = built.layout.block_size
        self._hit_policy = hit_policy

    def fill(self, request: Request) -> None:
        batch = Batch(self._engine, [request], max_new=1)
        batch.finish()
        batch.release()

    def take(self, request: Request, stages: Stages) -> None:
        """Up to where the kernels' launches begin, or where the state is waited for."""
        engine, job = self._engine, job_of(request, 1, self._hit_policy, lambda event: None)
        sequence = stages.time(f"{self.name}: checks and hashes it", lambda: sequence_of(engine, job))
        engine.submit(sequence)
        stages.time(f"{self.name}: admits it", engine.admit)
        if not self._hit_policy.state_arrives:
            stages.time(f"{self.name}: the step's index tensors", lambda: self._plan(sequence))
        engine.release(sequence)

    def _plan(self, sequence: Sequence) -> ForwardBatch:
        start, claim = sequence.num_computed, sequence.held
        step = SequenceInput(sequence.tokens[start:], start, claim.block_ids, sequence.state_slot, claim.slot)
        return ForwardBatch.build([step], self._block_size, torch.device("cpu"))


def once(body: bytes, builder: RequestBuilder, decode: Node, prefill: Node, stages: Stages) -> None:
    parsed = stages.time("router: parses the body", lambda: parse_body(CompletionBody, body))
    (request,) = stages.time("router: builds the request", lambda: builder.completion(parsed)).requests
    start = m.Start(request, may_prefill_remotely=True)
    sent = stages.time(
        "router: writes the decode call", lambda: codecs.encode_one_of(start, pb.DecodeCommand()).SerializeToString()
    )
    stages.time("router: hashes it, while the decode node reserves", lambda: prefix_keys(request.tokens, 16))
    command = stages.time(
        "decode node: reads the call", lambda: codecs.decode_one_of(pb.DecodeCommand.FromString(sent))
    )
    assert isinstance(command, m.Start)
    decode.take(command.request, stages)
    work = m.PrefillRequest(request, None, None, None)
    sent = stages.time(
        "router: writes the prefill call", lambda: codecs.encode(work, pb.PrefillRequest()).SerializeToString()
    )
    arrived = stages.time(
        "prefill node: reads the call", lambda: codecs.decode(pb.PrefillRequest.FromString(sent), m.PrefillRequest)
    )
    prefill.take(arrived.request, stages)


def main(tokens: int = 8192, rounds: int = 30) -> None:
    """Host work for a cached prompt, stage by stage."""
    builder = RequestBuilder("bench", ModelTokens(MODEL), lambda: 2 * tokens)
    config = EngineConfig(threads=1, cache_bytes=CACHE_BYTES, max_model_tokens=2 * tokens)
    decode, prefill = (
        Node(name, build_engine(str(MODEL), config, time.monotonic), policy)
        for name, policy in (("decode node", ReceiveState()), ("prefill node", ResumeLocally()))
    )
    body = body_of(fresh(tokens, seed=0), 2)
    (request,) = builder.completion(parse_body(CompletionBody, body)).requests
    for node in (decode, prefill):
        node.fill(replace(request, request_id=node.name))
    stages = Stages()
    for _ in range(rounds):
        once(body, builder, decode, prefill, stages)
    print(table_header("stage", "ms"))
    for name, ms in stages.best_ms.items():
        print(table_row(name, f"{ms:.3f}"))
    print(table_row("all", f"{sum(stages.best_ms.values()):.3f}"))
