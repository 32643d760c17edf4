"""A workload of chats that share system prompts, with the answers that each of its requests must get."""

import random
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch

from headrace.engine.build import BuiltEngine
from headrace.request import Request
from tests.support.engine.driving import GREEDY, Run, engine_of, request, submit
from tests.support.engine.oracle import MIN_MARGIN, oracle

NUM_AT_ONCE = 16


@dataclass(frozen=True)
class Turn:
    """One request of a conversation; its prompt holds the turns before it."""

    request: Request
    answer: tuple[int, ...]

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and answer: the last one sampled is never computed."""
        return len(self.request.tokens) + len(self.answer) - 1


@dataclass
class Draft:
    """A conversation in the making: the messages to come, each with the length of its answer."""

    system: list[int]
    to_come: list[tuple[list[int], int]]
    boundaries: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [*self.turns[-1].request.tokens, *self.turns[-1].answer] if self.turns else self.system

    def next_request(self) -> Request:
        (message, num_tokens), text = self.to_come.pop(0), self.text
        self.boundaries.append(len(text))
        sampling = replace(GREEDY, max_tokens=num_tokens)
        return request([*text, *message], sampling, boundaries=tuple(self.boundaries))


def conversations(path: Path, num_requests: int, seed: int) -> list[list[Turn]]:
    """Conversations of 1 to 5 turns. An engine with caching off gives the answers, `NUM_AT_ONCE` at a time; each must
    be what transformers prefers. None stands on the edge between two tokens, where a batch's order of summing would
    decide.
    """
    rng = random.Random(seed)
    # No checkpoints, and a salt for each request: nothing is ever reused. Room for as many of the longest conversation.
    engine = engine_of(path, num_blocks=NUM_AT_ONCE * 27, num_slots=NUM_AT_ONCE * 2, checkpoint_policy="none")
    systems = [_tokens(rng, length) for length in (10, 23, 37, 64)]
    chats: list[list[Turn]] = []
    while num_left := num_requests - sum(len(chat) for chat in chats):
        drafts: list[Draft] = []
        while num_left:
            num_turns = min(rng.randint(1, 5), num_left)
            to_come = [(_tokens(rng, rng.randint(2, 30)), rng.randint(1, 40)) for _ in range(num_turns)]
            drafts.append(Draft(rng.choice(systems), to_come))
            num_left -= num_turns
        _answer(engine, drafts)
        chats += [draft.turns for draft in drafts if _is_clear(path, draft)]
    return chats


def _answer(engine: BuiltEngine, drafts: list[Draft]) -> None:
    waiting, running, salts = list(drafts), list[tuple[Draft, Request, Run]](), count()
    while waiting or running:
        while waiting and len(running) < NUM_AT_ONCE:
            draft = waiting.pop(0)
            asked = draft.next_request()
            running.append((draft, asked, submit(engine, replace(asked, salt=next(salts).to_bytes(4, "little")))))
        engine.engine.admit()
        if not engine.engine.step():
            raise AssertionError("the engine is idle, with requests at work")
        for talk in list(running):
            draft, asked, run = talk
            if run.is_finished:
                engine.engine.release(run.sequence)
                running.remove(talk)
                assert run.sequence.num_prefilled == len(asked.tokens), "caching is off"
                draft.turns.append(Turn(asked, tuple(run.tokens)))
                if draft.to_come:
                    waiting.insert(0, draft)
    engine.engine.cache.check()


@torch.inference_mode()
def _is_clear(path: Path, draft: Draft) -> bool:
    """False where transformers itself is near a tie. Raises if it is not, and prefers another answer."""
    logits_TV = oracle(path)(torch.tensor([draft.text]), use_cache=False).logits[0]
    starts = [len(turn.request.tokens) for turn in draft.turns]
    answered = [start + i for start, turn in zip(starts, draft.turns, strict=True) for i in range(len(turn.answer))]
    (best_A, second_A), (preferred_A, _) = (each.T for each in logits_TV[torch.tensor(answered) - 1].topk(2))
    if (best_A - second_A).min() < MIN_MARGIN:
        return False
    assert [draft.text[position] for position in answered] == preferred_A.tolist()
    return True


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 512) for _ in range(length)]
