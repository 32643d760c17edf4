"""Drafts begin and end at random while requests come, wait, go and fail: nobody gets another token than without drafts.

Steps follow each other before their tokens are known, so that steps without drafts stand behind checks, and checks
behind these. A test plays many games, in engines with much room and with little, and asserts that every rare state
occurred in them. All is decided by seeds: clocks count their readings.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import pytest
import torch

from headrace.engine.build import BuiltEngine
from headrace.grammar import regex_grammar
from headrace.request import BadWord
from tests.support.engine.drafters import ANSWER, KNOWN, MTP_DRAFTS, RANDOM, ROOMY, mtp_engine_of, together
from tests.support.engine.driving import Run, request, small_engine
from tests.support.engine.oracle import random_prompt
from tests.support.engine.random_game import MOST_RUNNING, RARE, RARE_PASSES, Game

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="captured passes run in torch's forms for a CPU"),
]
LONGEST = 40  # tokens of an answer
PROMPTS = [KNOWN, *(random_prompt(n, seed=n) for n in (14, 15, 18, 19, 30, 33, 40))]
SAMPLINGS = {
    ANSWER: 10,
    RANDOM: 4,
    replace(ANSWER, stop_token_ids=(9,), min_tokens=4): 1,
    replace(ANSWER, stop_token_ids=(11,), min_tokens=8): 1,
    replace(RANDOM, stop_token_ids=(7,)): 1,
    # Beside these, steps follow known tokens.
    replace(RANDOM, repetition_penalty=1.2): 1,
    replace(ANSWER, bad_words=(BadWord((7, 9)), BadWord((11, 11, 7)))): 1,
    replace(ANSWER, bias_ids=(), bias_values=(), ignore_eos=False, grammar=regex_grammar("(ab|ba){3,9}c?")): 1,
}
"""How requests are sampled, and how many of 20 so."""
DRAFTS = {"speculation": MTP_DRAFTS, "overlap": True}
Clock = Callable[[], float]


def roomy(path: Path, dice: random.Random, clock: Clock) -> BuiltEngine:
    sizes = {"max_running": dice.choice((2, MOST_RUNNING)), "max_step_tokens": dice.choice((48, 256))}
    return small_engine(path, clock, cache_bytes=ROOMY, block_size=dice.choice((4, 8, 16)), **sizes, **DRAFTS)


def of_short_texts(path: Path, dice: random.Random, clock: Clock) -> BuiltEngine:
    """Many answers end where the model's longest text does."""
    return small_engine(path, clock, cache_bytes=ROOMY, max_model_tokens=64, max_running=MOST_RUNNING, **DRAFTS)


def of_few_blocks(path: Path, dice: random.Random, clock: Clock) -> BuiltEngine:
    """Just enough blocks for one of the longest texts."""
    return mtp_engine_of(path, 10, 9, clock, block_size=8, max_running=MOST_RUNNING, overlap=True)


def of_few_draft_slots(path: Path, dice: random.Random, clock: Clock) -> BuiltEngine:
    """One slot for all the states that rest on drafts."""
    num_slots, block_size = dice.choice((3, 4, 5)), dice.choice((8, 16))
    return mtp_engine_of(path, 48, num_slots, clock, block_size=block_size, max_running=MOST_RUNNING, overlap=True)


ENGINES = (roomy, of_short_texts, *2 * (of_few_blocks, of_few_draft_slots))


@pytest.fixture(scope="module")
def answered(trained: Path) -> list[Run]:
    """The longest answers without drafts: to each prompt one of each sampling, as often as that is to be asked for.

    Some prompts go on with an answer. All games ask for beginnings of these, whatever their course: among as many
    answers as games could ask for, two tokens are somewhere so nearly alike that rounding decides between them. Among
    these, logits of the drawn token and of the next best lie 4e-5 apart or more, where rounding makes 4e-6.
    """
    plain = small_engine(trained)
    answers = together(plain, [request(prompt, replace(ANSWER, max_tokens=16)) for prompt in PROMPTS[:4]])
    longer = [[*prompt, *run.tokens, *random_prompt(5)] for prompt, run in zip(PROMPTS, answers, strict=False)]
    found: list[Run] = []
    for sampling, times in SAMPLINGS.items():
        longest = replace(sampling, max_tokens=LONGEST, logprobs=0)
        found += times * together(plain, [request(prompt, longest) for prompt in PROMPTS + longer])
    return found


def play(seed: int, is_captured: bool, path: Path, answered: list[Run]) -> Counter[str]:
    """Plays a game in each of ENGINES, with enough memory and without; counts the rare states of all."""
    seen: Counter[str] = Counter()
    for number, (engine, fails) in enumerate(product(ENGINES, (False, True))):
        dice, ticks = random.Random(f"{seed} {is_captured} {number}"), count()
        built = engine(path, dice, lambda ticks=ticks: next(ticks) * 1e-5)
        game = Game(built, answered, dice, is_captured=is_captured)
        if fails:
            game.fail_at_random()
        try:
            game.play()
            game.assert_answers()
        except Exception as error:
            error.add_note(f"in game {number} of seed {seed}")
            raise
        seen.update(game.seen)
    return seen


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("first_seed", [0, 4, 8])
def test_answers_are_those_without_drafts(
    first_seed: int, is_captured: bool, trained: Path, answered: list[Run]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 4):
        seen.update(play(seed, is_captured, trained, answered))
    rare = (*RARE, *RARE_PASSES) if is_captured else RARE
    assert not [each for each in rare if not seen[each]], f"not every rare state occurred: {seen}"
