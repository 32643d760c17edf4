"""A workload of chats that share system prompts, with the answers that each of its requests must get."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.driving import GREEDY, engine_of, generate, request
from wire.messages import Request


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
    """Conversations of 1 to 5 turns. The answers come from one request at a time, with caching off."""
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
            tokens += _tokens(rng, rng.randint(2, 30))
            sampling = replace(GREEDY, max_tokens=rng.randint(1, 40))
            asked = request(tokens, sampling, boundaries=tuple(boundaries))
            run = generate(alone, replace(asked, salt=num_made.to_bytes(4, "little")))
            assert run.sequence.num_prefilled == len(tokens), "caching is off"
            chats[-1].append(Turn(asked, tuple(run.tokens)))
            tokens += run.tokens
            num_made += 1
    return chats


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 512) for _ in range(length)]
