"""A load of questions whose answers are known, and what came of it: right, wrong, errors, and how soon."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.support.cluster.client_process import client_process
from tests.support.cluster.recall_clients import Answer, Habits, Question, recall_clients
from tests.support.patience import PATIENCE_S
from tiny_models.recall import RecallQuestion, held_out_questions, is_right

NUM_QUESTIONS = 24
ANSWER_TOKENS = 16
MIN_MARGIN = 5e-4
"""Between the best token's log-probability and the second's: another order of summing could swap closer ones."""


@dataclass
class RecallLoad:
    """Asks `questions`: only such as the undisturbed cluster answers right, and not by a hair."""

    url: str
    questions: Sequence[Question]
    seed: int = 0
    answers: list[Answer] = field(default_factory=list)

    @classmethod
    async def against(
        cls, url: str, model: Path, seed: int = 0, *, as_chats: bool = False, answer_tokens: int = ANSWER_TOKENS
    ) -> "RecallLoad":
        """Asks every question once, with nothing broken; the answer must hold the code that was asked for."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        asked = held_out_questions(NUM_QUESTIONS, seed=seed, encode=lambda text: tokenizer.encode(text).ids)
        gate = asyncio.Semaphore(4)

        async def one(question: RecallQuestion) -> Question | None:
            path, body = _asking(question, tokenizer, answer_tokens, as_chat=as_chats)
            async with gate:
                reply = await http.post(path, json=body | _with_logprobs(as_chats))
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            tokens = choice["token_ids"]
            said = tokenizer.decode(tokens).split("\n")[0]
            if not is_right(question, said) or min(_margins(choice["logprobs"])) < MIN_MARGIN:
                return None
            return Question(path, body, tokens)

        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            known = [it for it in await asyncio.gather(*map(one, asked)) if it is not None]
        assert len(known) >= NUM_QUESTIONS // 3, f"only {len(known)} of {NUM_QUESTIONS} questions answered right"
        return cls(url, known, seed)

    @asynccontextmanager
    async def running(self, habits: Habits) -> AsyncIterator[None]:
        """Within the block they ask; at its end each still gets the answer that it waits for."""
        clients = partial(recall_clients, self.url, self.questions, habits, self.seed)
        async with client_process(clients, self.answers.append):
            yield

    async def answered(self, count: int) -> None:
        """Until so many more answers are there; errors and wrong ones are answers, too."""
        enough = len(self.answers) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < enough:
                await asyncio.sleep(0.02)

    async def served_again_s(self, at_s: float) -> float:
        """Until one has a right answer that was asked after `at_s`: when it was there."""
        async with asyncio.timeout(PATIENCE_S):
            while not (served := [it.ended_s for it in self.answers if it.is_right and it.asked_s >= at_s]):
                await asyncio.sleep(0.02)
        return min(served)

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def num_migrated(self) -> int:
        return sum(answer.migrated for answer in self.answers)

    @property
    def num_given_up(self) -> int:
        return sum(not answer.is_right and not answer.wrong for answer in self.answers)

    @property
    def errors(self) -> Counter[str]:
        """All that clients met, also those that then got their answer."""
        return Counter(error for answer in self.answers for error in answer.errors)

    @property
    def wrong(self) -> list[str]:
        return [answer.wrong for answer in self.answers if answer.wrong]


def percentile(values: Iterable[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _asking(
    question: RecallQuestion, tokenizer: Tokenizer, answer_tokens: int, *, as_chat: bool
) -> tuple[str, dict[str, Any]]:
    body = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if as_chat:
        return "/v1/chat/completions", body | {"messages": list(question.messages)}
    return "/v1/completions", body | {"prompt": tokenizer.encode(question.prompt_text).ids}


def _with_logprobs(as_chat: bool) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if as_chat else {"logprobs": 2}


def _margins(logprobs: dict[str, Any]) -> list[float]:
    """Between the best token and the second, at each position."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in logprobs["content"]]
    else:
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
    ordered = [sorted(top, reverse=True) for top in tops]
    return [top[0] - top[1] for top in ordered if len(top) > 1]
