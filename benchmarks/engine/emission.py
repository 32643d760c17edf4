"""Checkpoints inside a prompt: one prefill with many of them against the same with one, on the CPU.

    python -m benchmarks emission [--tokens 8192] [--checkpoints 32] [--rounds 7] [--threads 1] [--cache-mib 128]

The shipped models, through the whole engine in its default chunks, policy `branch` without its grid: hints of
the request put the checkpoints at even distances, the last one stands at the prompt's last boundary in both
cases. One request may fill half of the slots, so many checkpoints need a large cache. The two alternate in one
process; times are processor time, so that other work on the machine does not count; a row shows the best of
each and the median of the rounds' ratios.
"""

import statistics
import time
from itertools import count

import torch

from benchmarks.shapes import TINY_MODELS
from headrace.cache.hits import HitPolicy, PrefixHit, ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Job
from headrace.request import Request, Sampling

_salts = count()


def main(tokens: int = 8192, checkpoints: int = 32, rounds: int = 7, threads: int = 1, cache_mib: int = 128) -> None:
    """A prefill with many checkpoints against one."""
    print(f"prefill of {tokens} tokens with {checkpoints} checkpoints and with one")
    print(f"{'model':<28}{'many s':>10}{'one s':>10}{'ratio':>8}")
    for path in sorted(TINY_MODELS.glob("headrace-tiny-*")):
        config = EngineConfig(
            cache_bytes=cache_mib << 20,
            state_share=0.5,
            checkpoint_grid_tokens=tokens,  # no grid: the hints alone decide how many there are
            threads=threads,
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
