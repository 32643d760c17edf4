"""Warms a model up for an absent GPU, then runs steps of many shapes; prints the kernels these compiled, as JSON.

    python -m tests.support.engine.warm_up_child MODEL_FOLDER

The model is the folder's, of random weights, with one more layer: it ends in attention. A process of its own, as
compiling_child.py. Nothing is launched, and no kernel is chosen that only Hopper's chips take.
"""

import json
import sys
from dataclasses import replace
from types import ModuleType

import torch
from triton import knobs
from triton.runtime import driver

from headrace.cache.tails import Tail
from headrace.engine.graphs.captured_passes import Captured
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.engine.warm_up import warm_up
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention import paged_attention
from headrace.kernels.lib.compile_ahead import compiling_ahead
from headrace.models.weights import load_config, random_model
from headrace.request import Sampling
from tests.support.kernels.compiling_child import Driver

LIMITS = {"max_step_tokens": 4096, "max_running": 32, "max_tokens": 4096}
GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


def main() -> None:
    choose_triton(list(sys.modules.values()))
    driver.set_active(Driver())
    compiled: list[str] = []
    knobs.compilation.listener = lambda src, **compilation: compiled.append(src.fn.__name__)
    config = load_config(sys.argv[1])
    attention = next(layer for layer in config.layers if layer.mixer == "attention")
    config = replace(config, layers=(*config.layers, attention))
    model = random_model(config, torch.bfloat16)
    memory = CacheMemory(model.cache_layout(block_size=16), num_blocks=600, num_slots=40)
    runner, rehearsal = ModelRunner(model, memory), ModelRunner(model, memory)
    with compiling_ahead():
        warm_up(rehearsal, **LIMITS, graphs=False)
        rehearsal.capture_decodes(LIMITS["max_running"], LIMITS["max_tokens"], once)
        rehearsal.capture_prefills(LIMITS["max_step_tokens"], LIMITS["max_tokens"], once)
        rehearsal.capture_mixes(once)
    warmed_up = compiled[:]
    compiled.clear()
    for step in steps():
        rows = sum(sequence.num_logits for sequence in step)
        runner.launch(step, [(row, GREEDY) for row in range(rows)])
    if model.has_tails:
        runner.write_states([(slot, slot, Tail(slot, 19), 24 + slot) for slot in range(3)])
    json.dump({"warm_up": warmed_up, "steps": compiled}, sys.stdout)


def choose_triton(modules: list[ModuleType]) -> None:
    """Makes every operation take its Triton kernel, as on a GPU."""
    for module in modules:
        if module.__name__.startswith("headrace.kernels.") and hasattr(module, "runs_triton"):
            module.runs_triton = lambda x: True
    paged_attention.DenseChunks = paged_attention.PagedChunks
    paged_attention.DenseContexts = paged_attention.PagedContexts


def once(work) -> Captured:
    return Captured(lambda: None, work())


def steps() -> list[list[SequenceInput]]:
    """Steps of odd numbers of rows, sequences and blocks, with contexts of one token to thousands, in all mixtures."""

    def prompt(i: int, num_tokens: int, start: int = 0, **more) -> SequenceInput:
        blocks = range(i, i + -(-(start + num_tokens) // 16))
        return SequenceInput([1] * num_tokens, start, blocks, i if start else None, i, **more)

    def decodes(*contexts: int) -> list[SequenceInput]:
        return [prompt(i, 1, context - 1) for i, context in enumerate(contexts)]

    return [
        [prompt(0, 2049)],
        [prompt(0, 777), prompt(1, 1333)],
        [prompt(i, 121 + i % 2) for i in range(17)],
        [prompt(0, 7, 3001, emit=((3003, 30),))],
        [prompt(0, 2501, 500, num_logits=0)],
        [*decodes(5, 140, 1700), prompt(9, 2101)],
        [*decodes(*range(2, 18)), prompt(19, 2100), prompt(20, 33, 64)],
        decodes(4001),
        [prompt(0, 1)],
    ]


if __name__ == "__main__":
    main()
