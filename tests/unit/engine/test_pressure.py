"""The cache may cost nobody a token: chats under every checkpoint policy, in pools that are far too small.

150 requests go through a prefill and a decode engine, a dozen at a time; some prefill on the decode engine,
some are aborted or stopped on the way. Both engines have a third of the blocks and slots that the requests at
work would like to have, so that blocks and checkpoints are evicted and requests preempted all the time.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.cluster.conversations import Turn, conversations
from tests.support.engine.drafters import drafting_engine_of, mtp_engine_of, sometimes_wrong
from tests.support.engine.driving import assert_nothing_in_use, engine_of
from tests.support.engine.mtp_checkpoints import add_mtp, train_mtp
from tests.support.node.engine_pair import EnginePair, Exchange

NUM_REQUESTS = 150
BLOCK_SIZE = 4  # small, so that answers outgrow what they claim at first
NUM_OPEN = 12  # conversations at a time
STATES_EACH = 3  # its own, and the checkpoints of its prompt and of its answer


@lru_cache(maxsize=1)
def chats_of(path: Path) -> list[list[Turn]]:
    return conversations(path, NUM_REQUESTS, seed=1)


@pytest.fixture(scope="module", params=["granite", "qwen35"])
def path(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "count"),
    [
        *((policy, None) for policy in ("none", "align", "every", "branch")),
        *(("none", "auto"), ("align", "fixed"), ("every", "fixed"), ("branch", "auto")),
    ],
)
def test_answers_are_those_of_transformers(policy: str, count: str | None, path: Path) -> None:
    chats = chats_of(path)
    turns = [turn for chat in chats for turn in chat]
    num_tokens = NUM_OPEN * sum(turn.num_computed for turn in turns) // len(turns)
    num_blocks, num_slots = num_tokens // BLOCK_SIZE // 3, NUM_OPEN * STATES_EACH // 3
    changes = {"checkpoint_policy": policy, "block_size": BLOCK_SIZE, "max_step_tokens": 128}
    decode = engine_of(path, num_blocks, num_slots, **changes)
    if count is not None:
        drafter = sometimes_wrong(*([*turn.request.tokens, *turn.answer] for turn in turns))
        decode = drafting_engine_of(path, drafter, num_blocks, num_slots, count=count, **changes)
    serve_crowd(EnginePair(engine_of(path, num_blocks, num_slots, **changes), decode), chats, policy)


@pytest.mark.slow
def test_drafts_of_the_models_own_layer_cost_nobody_a_token(tiny_checkpoint, tmp_path: Path) -> None:
    """The layer knows a few of the answers."""
    base = tiny_checkpoint("qwen35")
    chats = chats_of(base)
    turns = [turn for chat in chats for turn in chat]
    path = Path(shutil.copytree(base, tmp_path / "mtp"))
    train_mtp(path, add_mtp(path), [[*t.request.tokens, *t.answer] for t in turns[:8]], num_steps=20)
    num_blocks = NUM_OPEN * sum(turn.num_computed for turn in turns) // len(turns) // BLOCK_SIZE // 3
    changes = {"block_size": BLOCK_SIZE, "max_step_tokens": 128}
    prefill, decode = (mtp_engine_of(path, num_blocks, NUM_OPEN * STATES_EACH // 3, **changes) for _ in range(2))
    serve_crowd(EnginePair(prefill, decode), chats, "branch")


def serve_crowd(pair: EnginePair, chats: list[list[Turn]], policy: str) -> None:
    answers = Crowd(pair, chats, seed=2).run()
    assert len(answers) == NUM_REQUESTS
    for turn, tokens in answers:
        assert tokens == list(turn.answer[: len(tokens)])
    num_complete = sum(len(tokens) == len(turn.answer) for turn, tokens in answers)
    assert NUM_REQUESTS // 2 < num_complete < NUM_REQUESTS
    assert pair.decode.engine.preemptions > 0
    if (drafting := pair.decode.engine.drafting) is not None:
        assert 0 < drafting.accepted_tokens < drafting.drafted_tokens
    for built in (pair.prefill, pair.decode):
        totals = built.engine.cache.stats().totals
        assert totals.block_evictions > 0
        assert (totals.checkpoints_evicted > 0) == (policy != "none")
        assert (totals.checkpoints_used > 0) == (policy != "none")
        assert_nothing_in_use(built)


@dataclass
class Talk:
    """A conversation that waits for an answer; `steps_left` until its patience ends and it does `gives_up`."""

    exchange: Exchange
    turn: Turn
    later: list[Turn]
    steps_left: int
    gives_up: Callable[[Exchange], None]


class Crowd:
    """The people who chat: NUM_OPEN at a time, each turn after the end of the one before; some lose patience."""

    def __init__(self, pair: EnginePair, chats: list[list[Turn]], seed: int) -> None:
        self._pair = pair
        self._coming = list(chats)
        self._rng = random.Random(seed)

    def run(self) -> list[tuple[Turn, list[int]]]:
        """Every turn with its answer, as far as it was waited for."""
        answers: list[tuple[Turn, list[int]]] = []
        talks: list[Talk] = []
        for _ in range(100_000):
            while self._coming and len(talks) < NUM_OPEN:
                talks.append(self._ask(self._coming.pop(0)))
            if not talks:
                return answers
            self._pair.step()
            for talk in list(talks):
                talk.steps_left -= 1
                if talk.steps_left == 0 and not talk.exchange.is_over:
                    talk.gives_up(talk.exchange)
                if talk.exchange.is_over:
                    talks.remove(talk)
                    answers.append((talk.turn, talk.exchange.tokens))
                    if talk.later:
                        self._coming.insert(0, talk.later)
        raise AssertionError("not done after 100,000 steps")

    def _ask(self, chat: list[Turn]) -> Talk:
        turn, *later = chat
        exchange = self._pair.start(turn.request, computes_locally=self._rng.random() < 0.25)
        gives_up = self._rng.choice([self._pair.abort, self._pair.stop])
        steps_left = self._rng.randint(1, 60) if self._rng.random() < 0.15 else -1
        return Talk(exchange, turn, later, steps_left, gives_up)
