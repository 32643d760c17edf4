"""Drafts leave the distribution of answers as it is: chi-square over 200,000 tokens of a Markov chain as the model.

Each drafter draws a sample of its own: with equal seeds all draw the same tokens (the last test), and seven tests of
one sample would be one test. Of seven samples that are right, one has a p below 0.01 in 7 % of all cases. So 0.01 is
the level of the seven together, and 0.01 / 7 that of each (Bonferroni). Seeds count on from 0, none chosen by its p.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from headrace.cache.layout import CacheLayout
from headrace.engine import settling
from headrace.engine.build import BuiltEngine, engine_around
from headrace.engine.sequence import Finished
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.models.config import ModelConfig
from headrace.models.logits import Logits
from headrace.models.weights import load_config
from headrace.request import Sampling
from headrace.speculation.config import SpeculationConfig
from headrace.speculation.drafter import Drafter
from tests.support.engine.drafters import num_drafted
from tests.support.engine.driving import SMALL, Run, request, submit

CPU = torch.device("cpu")
VOCAB_SIZE, NUM_TOKENS, AT_ONCE, LENGTH = 12, 200_000, 64, 500
LOGITS = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
NUM_ANSWERS = NUM_TOKENS // LENGTH
SAMPLING = Sampling(max_tokens=LENGTH, seed=0, temperature=0.9, top_p=0.95, min_p=0.02, ignore_eos=True)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class MarkovChain:
    """A model whose next token depends on the last one alone, by `LOGITS`."""

    config: ModelConfig
    uses_last_token_queries: bool = False
    fingerprint: str = "chain"
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    mtp: None = None
    draft_head: None = None
    has_tails: bool = False

    def cache_layout(self, block_size: int, state_dtype: str = "float32") -> CacheLayout:
        return self.config.cache_layout(self.fingerprint, "float32", block_size, state_dtype)

    def tail_row_bytes(self, num_places: int) -> int:
        return 0

    def hidden(self, batch: ForwardBatch, memory: CacheMemory) -> Tensor:
        return batch.tokens_T if batch.logit_rows is None else batch.tokens_T[batch.logit_rows]

    def last_hidden(self, memory: CacheMemory, slots: Tensor) -> Tensor:
        return slots

    def draft_hidden(self, batch: ForwardBatch, memory: CacheMemory, previous: Tensor) -> Tensor:
        return batch.tokens_T

    def logits(self, hidden: Tensor) -> Logits:
        return Logits(LOGITS[hidden], 1.0)

    def best_drafts(self, hidden: Tensor, out: Tensor) -> None:
        out.copy_(LOGITS[hidden].argmax(dim=-1))


class MostLikely:
    """Proposes the best next token of each, and of that, and so on."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        drafts = [int(LOGITS[tokens[-1]].argmax())]
        while len(drafts) < max_drafts:
            drafts.append(int(LOGITS[drafts[-1]].argmax()))
        return drafts


class AnyToken:
    """Proposes so many tokens, whichever they are."""

    def __init__(self) -> None:
        self._dice = Random(0)

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return self._dice.choices(range(VOCAB_SIZE), k=self._dice.randint(0, max_drafts))


class LeastLikely:
    """Proposes what the filters leave no chance."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return [int(LOGITS[tokens[-1]].argmin())] * max_drafts


def engine(config: ModelConfig, drafter: Drafter | str | None, count: str = "fixed") -> BuiltEngine:
    """`drafter`: one of a test, the name of one of the product's (the layer of `mtp` knows the chain), or none."""
    name, drafter = (drafter, None) if isinstance(drafter, str) else ("none", drafter)
    speculation = SpeculationConfig(name, count)
    small = replace(SMALL, speculation=speculation, max_running=AT_ONCE, max_step_tokens=4096, cache_bytes=64 << 20)
    new_drafter = None if drafter is None else lambda request: drafter
    return engine_around(MarkovChain(config), small, time.monotonic, new_drafter=new_drafter)  # type: ignore[arg-type]


def probabilities(sampling: Sampling) -> Tensor:
    """[V, V] float64: of each next token behind each, after temperature, min-p and top-p, in plain arithmetic."""
    shares = (LOGITS.double() / sampling.temperature).softmax(dim=-1)
    ordered, order = shares.sort(dim=-1, descending=True)
    is_kept = (ordered.cumsum(dim=-1) - ordered < sampling.top_p) & (ordered >= sampling.min_p * ordered[:, :1])
    kept = torch.zeros_like(shares).scatter(1, order, ordered * is_kept)
    return kept / kept.sum(dim=-1, keepdim=True)


def answers(built: BuiltEngine, seeds: range) -> Iterator[list[int]]:
    """Texts with their prompt's one token first, `LENGTH` tokens drawn for each seed."""
    for first in range(0, len(seeds), AT_ONCE):
        some = seeds[first : first + AT_ONCE]
        runs = [submit(built, request([seed % VOCAB_SIZE], replace(SAMPLING, seed=seed))) for seed in some]
        _serve(built, runs)
        yield from ([seed % VOCAB_SIZE, *run.tokens] for seed, run in zip(some, runs, strict=True))


def _serve(built: BuiltEngine, runs: list[Run]) -> None:
    """As `serve`, but checks no pools, which would take three quarters of the time."""
    while runs:
        built.engine.admit()
        built.engine.step()
        for run in runs:
            if run.events and isinstance(run.events[-1], Finished):
                built.engine.release(run.sequence)
        runs = [run for run in runs if run.sequence.claim is not None or not run.events]


def p_value(built: BuiltEngine, sample: int) -> float:
    """Of the next tokens behind each, over the answers of the given number's seeds, beside `probabilities`."""
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for text in answers(built, range(sample * NUM_ANSWERS, (sample + 1) * NUM_ANSWERS)):
        pairs = torch.tensor(text)
        counts.index_put_((pairs[:-1], pairs[1:]), torch.ones(1, dtype=torch.float64), accumulate=True)
    assert counts.sum() == NUM_TOKENS
    expected = probabilities(SAMPLING) * counts.sum(dim=-1, keepdim=True)
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    assert expected[is_possible].min() > 5  # else chi-square is no measure
    statistic = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    freedom = is_possible.sum() - VOCAB_SIZE
    p = torch.special.gammaincc(freedom.double() / 2, statistic / 2)
    drafted, accepted = num_drafted(built)
    print(f"\nchi-square {statistic:.1f}, freedom {freedom}: p = {p:.3g}; {accepted} of {drafted} drafts right")
    return float(p)


CASES: tuple[tuple[type[Drafter] | str, str], ...] = (
    *((drafter, "fixed") for drafter in (MostLikely, AnyToken, LeastLikely, "ngram", "suffix", "mtp")),
    (MostLikely, "auto"),
)
LEVEL = 0.01 / len(CASES)


@pytest.fixture
def chain(tiny_checkpoint) -> ModelConfig:
    return replace(load_config(tiny_checkpoint("granite")), vocab_size=VOCAB_SIZE, eos_token_ids=())


@pytest.mark.parametrize(
    ("sample", "drafter", "count"),
    [(sample, *case) for sample, case in enumerate(CASES)],
    ids=[f"{getattr(drafter, '__name__', drafter)}-{count}" for drafter, count in CASES],
)
def test_tokens_are_distributed_as_the_model_says(
    sample: int, drafter: type[Drafter] | str, count: str, chain: ModelConfig
) -> None:
    built = engine(chain, drafter if isinstance(drafter, str) else drafter(), count)
    assert p_value(built, sample) > LEVEL
    drafted, accepted = num_drafted(built)
    assert drafted > (NUM_TOKENS // 4 if count == "fixed" else 0)
    assert (accepted > 0) == (drafter is not LeastLikely)


def test_one_wrong_draft_in_25_that_counts_as_right_shows(chain: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token drawn in its place stays; the next one was drawn behind the draft. Only where that one is possible
    behind the token that stays, too: what is impossible shows in any number."""
    is_possible, dice = probabilities(SAMPLING) > 0, Random(1)

    def num_accepted(drawn: Sequence[int], drafts: Sequence[int]) -> int:
        for place, draft in enumerate(drafts):
            passes = dice.random() < 1 / 25 and is_possible[drawn[place], drawn[place + 1]]
            if drawn[place] != draft and not passes:
                return place
        return len(drafts)

    monkeypatch.setattr(settling, "num_accepted", num_accepted)
    assert p_value(engine(chain, "ngram"), len(CASES)) < LEVEL


def test_the_same_seeds_give_the_same_tokens_with_and_without_drafts(chain: ModelConfig) -> None:
    seeds = range(AT_ONCE // 4)
    plain = list(answers(engine(chain, None), seeds))
    for drafter in (MostLikely(), AnyToken(), LeastLikely(), "ngram", "suffix", "mtp"):
        assert list(answers(engine(chain, drafter), seeds)) == plain
