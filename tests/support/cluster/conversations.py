"""A workload of chats that share system prompts, with the answers that each of its requests must get."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Sampled
from headrace.request import Request
from tests.support.engine.driving import GREEDY, Run, engine_of, generate, request
from tests.support.engine.oracle import MIN_MARGIN


@dataclass(frozen=True)
class Turn:
    """One request of a conversation; its prompt holds the turns before it."""

    request: Request
    answer: tuple[int, ...]

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and answer: the last one sampled is never computed."""
        return len(self.request.tokens) + len(self.answer) - 1


def conversations(path: Path, num_requests: int, seed: int) -> list[list[Turn]]:
    """Conversations of 1 to 5 turns. The answers come from one request at a time, with caching off; none stands on the
    edge between two tokens, where a batch's order of summing would decide.
    """
    rng = random.Random(seed)
    # No checkpoints, and a salt for each request: nothing is ever reused. Room for the longest conversation alone,
    # since the cache is checked after each step, entry by entry.
    alone = engine_of(path, num_blocks=32, num_slots=3, checkpoint_policy="none")
    systems = [_tokens(rng, length) for length in (10, 23, 37, 64)]
    chats: list[list[Turn]] = []
    num_made = 0
    while num_made < num_requests:
        chats.append([])
        tokens, boundaries = list(rng.choice(systems)), []
        for _ in range(min(rng.randint(1, 5), num_requests - num_made)):
            boundaries.append(len(tokens))
            turn = _clear_turn(alone, rng, tokens, tuple(boundaries), salt=num_made.to_bytes(4, "little"))
            chats[-1].append(turn)
            tokens = [*turn.request.tokens, *turn.answer]
            num_made += 1
    return chats


def _clear_turn(
    alone: BuiltEngine, rng: random.Random, before: list[int], boundaries: tuple[int, ...], salt: bytes
) -> Turn:
    while True:
        tokens = [*before, *_tokens(rng, rng.randint(2, 30))]
        asked = request(tokens, replace(GREEDY, max_tokens=rng.randint(1, 40)), boundaries=boundaries)
        run = generate(alone, replace(asked, salt=salt, sampling=replace(asked.sampling, logprobs=2)))
        assert run.sequence.num_prefilled == len(tokens), "caching is off"
        if _margin(run) >= MIN_MARGIN:
            return Turn(asked, tuple(run.tokens))


def _margin(run: Run) -> float:
    """Between the best token and the second, where they are closest."""
    tops = [event.token.logprobs.top for event in run.events if isinstance(event, Sampled)]
    return min(best.logprob - second.logprob for best, second in tops)


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 512) for _ in range(length)]
