"""The engine on a CPU: its forward pass against transformers, and a prefill with many checkpoints against one.

    python -m benchmarks cpu-engine [--threads 2] [--rounds 5]
    python -m benchmarks emission [--tokens 8192] [--checkpoints 32] [--rounds 7] [--cache-mib 128]

`cpu-engine`: prefill and decode rates in float32 with the same weights, models of 7 to 9 M parameters (vocabulary 4096,
hidden 256, 8 layers). Both sides run the same work in alternating rounds, so that a busy machine slows both; a row
shows the best round of each and the median of the rounds' ratios.

`emission`: the shipped models, through the whole engine in its default chunks, policy `branch` without its grid: hints
of the request put the checkpoints at even distances, the last one stands at the prompt's last boundary in both cases.
One request may fill half of the slots, so many checkpoints need a large cache. Times are processor time.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.shapes import CPU_SHAPES, TINY_MODELS, write_shape, write_weights
from headrace.cache.hits import HitPolicy, PrefixHit, ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.runner import ModelRunner
from headrace.engine.sequence import Job
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_step import SequenceStep
from headrace.models.model import HybridModel
from headrace.models.weights import load_model
from headrace.request import Request, Sampling

BLOCK_SIZE = 16
PROMPT_TOKENS = (128, 512, 2048)
DECODE_BATCHES = (1, 8)
DECODE_CONTEXT = 128  # tokens before the first timed one
DECODE_STEPS = 32


@dataclass(frozen=True)
class Contest:
    """One row: tokens of work, and how each side is timed, in seconds."""

    name: str
    num_tokens: int
    ours: Callable[[], float]
    theirs: Callable[[], float]


@dataclass(frozen=True)
class Outcome:
    name: str
    our_rate: float  # tokens a second, best round
    their_rate: float
    ratio: float  # median over rounds of ours / theirs


def run_contest(contest: Contest, rounds: int) -> Outcome:
    contest.ours(), contest.theirs()  # warm-up
    times = [(contest.ours(), contest.theirs()) for _ in range(rounds)]
    return Outcome(
        name=contest.name,
        our_rate=contest.num_tokens / min(ours for ours, _ in times),
        their_rate=contest.num_tokens / min(theirs for _, theirs in times),
        ratio=statistics.median(theirs / ours for ours, theirs in times),
    )


def contests(runner: ModelRunner, oracle: PreTrainedModel) -> list[Contest]:
    rows = []
    for n in PROMPT_TOKENS:
        prompt = prompts(1, n)[0]
        ours, theirs = partial(time_our_prefill, runner, prompt), partial(time_their_prefill, oracle, prompt)
        rows.append(Contest(f"prefill {n}", n, ours, theirs))
    for b in DECODE_BATCHES:
        batch = prompts(b, DECODE_CONTEXT)
        ours, theirs = partial(time_our_decode, runner, batch), partial(time_their_decode, oracle, batch)
        rows.append(Contest(f"decode batch {b}", b * DECODE_STEPS, ours, theirs))
    return rows


def prompts(batch: int, num_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 4096, (batch, num_tokens), generator=generator).tolist()


def make_runner(model: HybridModel, max_sequences: int, max_tokens: int) -> ModelRunner:
    """A runner with memory for `max_sequences` sequences of `max_tokens` tokens: see `blocks_of`."""
    num_blocks = max_sequences * -(-max_tokens // BLOCK_SIZE)
    return ModelRunner(model, CacheMemory(model.cache_layout(BLOCK_SIZE), num_blocks, max_sequences))


def blocks_of(runner: ModelRunner, sequence: int) -> range:
    each = runner.memory.num_blocks // runner.memory.num_slots
    return range(sequence * each, (sequence + 1) * each)


def time_our_prefill(runner: ModelRunner, prompt: list[int]) -> float:
    started = time.perf_counter()
    runner.forward([SequenceStep(prompt, 0, blocks_of(runner, 0), None, 0)])
    return time.perf_counter() - started


@torch.inference_mode()
def time_their_prefill(oracle: PreTrainedModel, prompt: list[int]) -> float:
    started = time.perf_counter()
    positions = torch.arange(len(prompt))[None]
    oracle(torch.tensor([prompt]), position_ids=positions, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def time_our_decode(runner: ModelRunner, prompt_batch: list[list[int]]) -> float:
    """Greedy steps after the prompts, each waiting for the tokens of the one before."""
    start = len(prompt_batch[0])
    logits = runner.forward(
        [SequenceStep(prompt, 0, blocks_of(runner, i), None, i) for i, prompt in enumerate(prompt_batch)]
    )
    tokens = logits.argmax(-1).tolist()
    started = time.perf_counter()
    for position in range(start, start + DECODE_STEPS):
        logits = runner.forward(
            [SequenceStep([token], position, blocks_of(runner, i), i, i) for i, token in enumerate(tokens)]
        )
        tokens = logits.argmax(-1).tolist()
    return time.perf_counter() - started


@torch.inference_mode()
def time_their_decode(oracle: PreTrainedModel, prompt_batch: list[list[int]]) -> float:
    ids = torch.tensor(prompt_batch)
    cache = DynamicCache(config=oracle.config)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    logits = oracle(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
    tokens = logits[:, -1].argmax(-1, keepdim=True)
    started = time.perf_counter()
    for position in range(ids.shape[1], ids.shape[1] + DECODE_STEPS):
        where = torch.full_like(tokens, position)
        logits = oracle(tokens, position_ids=where, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
    return time.perf_counter() - started


def main(threads: int = 2, rounds: int = 5) -> None:
    """The forward pass against transformers, on CPU."""
    torch.set_num_threads(threads)
    for family, shape in CPU_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_shape(shape, Path(folder) / family)
            write_weights(path, "cpu", torch.float32)
            oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            runner = make_runner(load_model(path), max(DECODE_BATCHES), max(PROMPT_TOKENS))
        parameters = sum(weight.numel() for weight in oracle.parameters())
        print(f"\n{family}: {parameters / 1e6:.1f} M parameters, {threads} threads")
        print(f"{'work':<16}{'ours tok/s':>12}{'HF tok/s':>12}{'ratio':>8}")
        for contest in contests(runner, oracle):
            outcome = run_contest(contest, rounds)
            print(f"{outcome.name:<16}{outcome.our_rate:>12.0f}{outcome.their_rate:>12.0f}{outcome.ratio:>8.2f}")


_salts = count()


def emission(
    tokens: int = 8192, checkpoints: int = 32, rounds: int = 7, threads: int = 1, cache_mib: int = 128
) -> None:
    """A prefill with many checkpoints against one."""
    print(f"prefill of {tokens} tokens with {checkpoints} checkpoints and with one")
    print(f"{'model':<28}{'many s':>10}{'one s':>10}{'ratio':>8}")
    for path in sorted(TINY_MODELS.glob("headrace-tiny-*")):
        config = EngineConfig(
            cache_bytes=cache_mib << 20,
            state_share=0.5,
            checkpoint_grid_tokens=tokens,  # no grid: the hints alone decide how many there are
            threads=1,
        )
        built = build_engine(str(path), config, time.monotonic)
        many, one, ratio = compare(built, tokens, checkpoints, rounds)
        print(f"{path.name:<28}{many:>10.3f}{one:>10.3f}{ratio:>8.3f}", flush=True)


def compare(built: BuiltEngine, num_tokens: int, num_checkpoints: int, rounds: int) -> tuple[float, float, float]:
    """Best seconds with many checkpoints, with one, and the median ratio over `rounds` alternating rounds."""
    prefill_seconds(built, num_tokens, 1), prefill_seconds(built, num_tokens, num_checkpoints)  # warm-up
    times = []
    for i in range(rounds):
        # Whoever goes second finds warmer caches: each does so in turn.
        order = (num_checkpoints, 1) if i % 2 else (1, num_checkpoints)
        taken = {checkpoints: prefill_seconds(built, num_tokens, checkpoints) for checkpoints in order}
        times.append((taken[num_checkpoints], taken[1]))
    ratio = statistics.median(many / one for many, one in times)
    return min(many for many, _ in times), min(one for _, one in times), ratio


def prefill_seconds(built: BuiltEngine, num_tokens: int, num_checkpoints: int) -> float:
    """Processor time of one prefill that finds nothing in the cache and publishes `num_checkpoints`."""
    request = _request(num_tokens, num_checkpoints)
    job = Job(request, _resume_locally, 1, time.monotonic() + 3600, lambda event: None)
    engine, sequence = built.engine, built.engine.sequence(job)
    engine.submit(sequence)
    started = time.process_time()
    engine.admit()
    while engine.step():
        pass
    seconds = time.process_time() - started
    engine.release(sequence)
    if len(sequence.all_checkpoints) != num_checkpoints:
        raise RuntimeError(f"{len(sequence.all_checkpoints)} checkpoints were published, not {num_checkpoints}")
    return seconds


def _request(num_tokens: int, num_checkpoints: int) -> Request:
    tokens = torch.randint(5, 4096, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    hints = tuple(num_tokens * i // num_checkpoints for i in range(1, num_checkpoints))
    sampling = Sampling(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    # A salt of its own: nothing of it is cached.
    return Request("r", tuple(tokens), num_tokens, sampling, salt=next(_salts).to_bytes(8, "little"), boundaries=hints)


def _resume_locally(hit: PrefixHit) -> HitPolicy:
    return ResumeLocally()
