"""Clients that keep asking a cluster what they know the answers to, and judge every answer that they get."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from tests.support.cluster.asking import ask_all
from tiny_models.recall import held_out_questions, is_right

NUM_QUESTIONS = 24
ANSWER_TOKENS = 16
ASK_TIMEOUT_S = 60.0


@dataclass
class RecallLoad:
    """`answers`: what the undisturbed cluster says to each prompt. Only questions that it answers right are asked."""

    url: str
    answers: dict[tuple[int, ...], list[int]]
    dice: random.Random
    num_right: int = 0
    num_migrated: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @classmethod
    async def against(cls, url: str, model: Path, seed: int = 0) -> "RecallLoad":
        """Asks every question once, with nothing broken; the answer must hold the code that was asked for."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        questions = held_out_questions(NUM_QUESTIONS, seed=seed, encode=lambda text: tokenizer.encode(text).ids)
        prompts = [tokenizer.encode(question.prompt_text).ids for question in questions]
        told = await ask_all(url, prompts, at_once=4, num_tokens=ANSWER_TOKENS)
        answers = {
            tuple(prompt): answer.tokens
            for question, prompt, answer in zip(questions, prompts, told, strict=True)
            if is_right(question, tokenizer.decode(answer.tokens).split("\n")[0])
        }
        assert len(answers) >= NUM_QUESTIONS // 2, f"only {len(answers)} of {NUM_QUESTIONS} questions answered right"
        return cls(url, answers, random.Random(seed))

    @asynccontextmanager
    async def running(self, num_clients: int) -> AsyncIterator[None]:
        """Within the block they ask; at its end each still gets the answer that it waits for."""
        stopped = asyncio.Event()
        async with httpx.AsyncClient(base_url=self.url, timeout=ASK_TIMEOUT_S) as client:
            clients = [asyncio.create_task(self._keep_asking(client, stopped)) for _ in range(num_clients)]
            try:
                yield
            finally:
                stopped.set()
                await asyncio.gather(*clients)

    @property
    def num_answered(self) -> int:
        """Errors and wrong ones are answers, too."""
        return self.num_right + sum(self.errors.values()) + len(self.wrong)

    async def answered(self, count: int) -> None:
        """Until so many more answers are there."""
        enough = self.num_answered + count
        async with asyncio.timeout(ASK_TIMEOUT_S):
            while self.num_answered < enough:
                await asyncio.sleep(0.02)

    async def _keep_asking(self, client: httpx.AsyncClient, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            prompt = self.dice.choice(list(self.answers))
            # Half of them share no cache with anybody: their whole prompt is computed and handed over.
            salt = str(self.dice.random()) if self.dice.random() < 0.5 else ""
            await self._ask(client, prompt, salt)

    async def _ask(self, client: httpx.AsyncClient, prompt: tuple[int, ...], salt: str) -> None:
        body = {
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "headrace": {"report": True, "salt": salt},
        }
        try:
            reply = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.errors[type(error).__name__] += 1
            return
        if reply.status_code != 200:
            self.errors[f"{reply.status_code} {reply.json()['error']['message'][:120]}"] += 1
            return
        content = reply.json()
        tokens = content["choices"][0]["token_ids"]
        if tokens != self.answers[prompt]:
            self.wrong.append(f"{tokens} instead of {self.answers[prompt]}: {content['usage']}")
            return
        self.num_right += 1
        self.num_migrated += content["usage"]["headrace"]["migrations"] > 0
