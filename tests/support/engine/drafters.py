"""Drafters of tests, which know the answers: what they get right or wrong is decided by the test."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headrace.engine.build import BuiltEngine, build_engine, engine_around
from headrace.engine.config import EngineConfig
from headrace.models.weights import load_model
from headrace.request import Request
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.driving import GREEDY, SMALL, Run, assert_nothing_in_use, serve, sized, submit
from tests.support.engine.oracle import random_prompt

VOCAB_SIZE = 512
MTP_DRAFTS = SpeculationConfig("mtp", "fixed", 3)
ROOMY = 32 << 20
"""Bytes of a cache that has a slot for each of 27 drafts in a step."""

KNOWN = random_prompt(17)
"""The prompt whose greedy answer the layer of a `trained` checkpoint knows."""
# Of three tokens, which that layer often guesses.
ANSWER = replace(GREEDY, max_tokens=24, bias_ids=(7, 9, 11), bias_values=(30.0, 30.0, 30.0))
RANDOM = replace(ANSWER, max_tokens=16, seed=3, temperature=0.9, top_p=0.95)


class KnownAnswers:
    """Proposes what known texts go on with; `is_wrong` says at which positions another token instead."""

    def __init__(
        self, texts: Iterable[Sequence[int]], is_wrong: Callable[[int], bool] = lambda position: False
    ) -> None:
        self._texts = [list(text) for text in texts]
        self._is_wrong = is_wrong

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        start = len(tokens)
        for text in self._texts:
            if text[:start] == list(tokens):
                known = text[start : start + max_drafts]
                return [
                    (token_id + 1) % VOCAB_SIZE if self._is_wrong(position) else token_id
                    for position, token_id in enumerate(known, start)
                ]
        return []


def always_right(*texts: Sequence[int]) -> KnownAnswers:
    return KnownAnswers(texts)


def always_wrong(*texts: Sequence[int]) -> KnownAnswers:
    return KnownAnswers(texts, lambda position: True)


def sometimes_wrong(*texts: Sequence[int]) -> KnownAnswers:
    """Right up to seven times in a row, and wrong up to twice."""
    return KnownAnswers(texts, lambda position: position % 11 in (3, 7, 8))


DRAFTERS = (always_right, always_wrong, sometimes_wrong)


def drafting_engine(
    path: Path,
    drafter: KnownAnswers,
    config: EngineConfig | None = None,
    *,
    max_drafts: int = 3,
    count: str = "fixed",
    **changes: object,
) -> BuiltEngine:
    """A small engine with a drafter."""
    speculation = SpeculationConfig(max_drafts=max_drafts, count=count)
    config = replace(config or SMALL, speculation=speculation, **changes)
    model = load_model(path, torch.float32, "cpu")
    return engine_around(model, config, time.monotonic, path / "tokenizer.json", lambda request: drafter)


def drafting_engine_of(
    path: Path,
    drafter: KnownAnswers,
    num_blocks: int,
    num_slots: int,
    *,
    max_drafts: int = 3,
    count: str = "fixed",
    **changes: object,
) -> BuiltEngine:
    """A small engine with a drafter: so many blocks and slots, and a third as many slots more for drafts."""
    config = sized(path, num_blocks, num_slots + num_slots // 3, **changes)
    built = drafting_engine(path, drafter, config, max_drafts=max_drafts, count=count)
    assert (built.sizes.num_blocks, built.sizes.num_slots) == (num_blocks, num_slots)
    return built


def mtp_engine_of(
    path: Path, num_blocks: int, num_slots: int, clock: Callable[[], float] = time.monotonic, **changes: object
) -> BuiltEngine:
    """An engine whose model's layer drafts, of so many blocks and slots, and a third as many slots more for drafts."""
    config = sized(path, num_blocks, num_slots + num_slots // 3, speculation=MTP_DRAFTS, **changes)
    built = build_engine(str(path), config, clock)
    assert (built.sizes.num_blocks, built.sizes.num_slots) == (num_blocks, num_slots)
    return built


def together(built: BuiltEngine, asked: Sequence[Request]) -> list[Run]:
    runs = [submit(built, each) for each in asked]
    serve(built, *runs)
    assert_nothing_in_use(built)
    return runs


def text(asked: Request, run: Run) -> list[int]:
    return [*asked.tokens, *run.tokens]


def num_drafted(built: BuiltEngine) -> tuple[int, int]:
    """Tokens drafted, and accepted."""
    drafting = built.engine.drafting
    assert drafting is not None
    return drafting.drafted_tokens, drafting.accepted_tokens


def steps(built: BuiltEngine, count: int) -> None:
    for _ in range(count):
        built.engine.admit()
        built.engine.step()
        built.engine.cache.check()
