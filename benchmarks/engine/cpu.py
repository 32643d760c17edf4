"""The forward pass against transformers on a CPU: prefill and decode rates in float32 with the same weights.

    python -m benchmarks cpu-engine [--threads 2] [--rounds 5]

Models of 7 to 9 M parameters (vocabulary 4096, hidden 256, 8 layers). Both sides run the same work in alternating
rounds; a row shows the best round of each and the median of the rounds' ratios.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.shapes import CPU_SHAPES, random_prompts, write_shape, write_weights
from benchmarks.timing import compare, table_header, table_row
from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import Tail, tail_interval
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel
from headrace.models.weights import load_model

BLOCK_SIZE = 16
PROMPT_TOKENS = (128, 512, 2048)
DECODE_BATCHES = (1, 8)
DECODE_CONTEXT = 128  # tokens before the first timed one
DECODE_STEPS = 32


class OurSide:
    """A runner with memory for the largest of the works; the sequences' blocks lie one behind the other."""

    def __init__(self, model: HybridModel) -> None:
        self._blocks_each = max(PROMPT_TOKENS) // BLOCK_SIZE
        num_sequences = max(DECODE_BATCHES)
        memory = CacheMemory(model.cache_layout(BLOCK_SIZE), num_sequences * self._blocks_each, num_sequences)
        self._runner, self._has_tails = ModelRunner(model, memory), model.has_tails

    def prefill_s(self, prompt: list[int]) -> float:
        started_s = time.perf_counter()
        self._runner.forward([SequenceInput(prompt, 0, self._blocks(0), None, 0)])
        return time.perf_counter() - started_s

    def decode_s(self, prompts: list[list[int]]) -> float:
        """Seconds of greedy steps after the prompts, each waiting for the tokens of the one before."""
        steps = [SequenceInput(prompt, 0, self._blocks(i), None, i) for i, prompt in enumerate(prompts)]
        tokens = self._runner.forward(steps).rows.argmax(-1).tolist()
        started_s = time.perf_counter()
        bases = [DECODE_CONTEXT] * len(prompts)
        for position in range(DECODE_CONTEXT, DECODE_CONTEXT + DECODE_STEPS):
            tails = [self._tail(i, base, position) for i, base in enumerate(bases)]
            steps = [
                SequenceInput([token], position, self._blocks(i), i, i, tail=tails[i]) for i, token in enumerate(tokens)
            ]
            tokens = self._runner.forward(steps).rows.argmax(-1).tolist()
            bases = [tail.after(position + 1).base if tail is not None else position + 1 for tail in tails]
        return time.perf_counter() - started_s

    def _tail(self, sequence: int, base: int, position: int) -> Tail | None:
        """A decode's tail, as the engine would have it, if the model keeps tails."""
        if not self._has_tails:
            return None
        return Tail(sequence, base).step(ChunkSpan(position, position + 1), tail_interval(BLOCK_SIZE))

    def _blocks(self, sequence: int) -> range:
        return range(sequence * self._blocks_each, (sequence + 1) * self._blocks_each)


class TheirSide:
    """The same model in transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def prefill_s(self, prompt: list[int]) -> float:
        started_s = time.perf_counter()
        positions = torch.arange(len(prompt))[None]
        self._model(torch.tensor([prompt]), position_ids=positions, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started_s

    @torch.inference_mode()
    def decode_s(self, prompts: list[list[int]]) -> float:
        ids, cache = torch.tensor(prompts), DynamicCache(config=self._model.config)
        tokens = self._next(ids, torch.arange(DECODE_CONTEXT).expand_as(ids), cache)
        started_s = time.perf_counter()
        for position in range(DECODE_CONTEXT, DECODE_CONTEXT + DECODE_STEPS):
            tokens = self._next(tokens, torch.full_like(tokens, position), cache)
        return time.perf_counter() - started_s

    def _next(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits = self._model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def row(name: str, num_tokens: int, ours_s: Callable[[], float], theirs_s: Callable[[], float], rounds: int) -> str:
    found = compare(lambda _: ours_s(), lambda _: theirs_s(), rounds)
    rates = f"{num_tokens / found.first_s:,.0f}", f"{num_tokens / found.second_s:,.0f}"
    return table_row(name, *rates, f"{found.ratio:.2f}")


def main(threads: int = 2, rounds: int = 5) -> None:
    """The forward pass against transformers, on CPU."""
    torch.set_num_threads(threads)
    for family, shape in CPU_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_shape(shape, Path(folder) / family)
            write_weights(path, "cpu", torch.float32)
            oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            ours, theirs = OurSide(load_model(path)), TheirSide(oracle)
        parameters = sum(weight.numel() for weight in oracle.parameters())
        print(f"\n{family}: {parameters / 1e6:.1f} M parameters, {threads} threads\n")
        print(table_header("work", "ours tok/s", "HF tok/s", "ratio"))
        for n in PROMPT_TOKENS:
            (prompt,) = random_prompts(1, n)
            print(row(f"prefill {n}", n, partial(ours.prefill_s, prompt), partial(theirs.prefill_s, prompt), rounds))
        for n in DECODE_BATCHES:
            prompts, num_tokens = random_prompts(n, DECODE_CONTEXT), n * DECODE_STEPS
            decodes = partial(ours.decode_s, prompts), partial(theirs.decode_s, prompts)
            print(row(f"decode batch {n}", num_tokens, *decodes, rounds), flush=True)
