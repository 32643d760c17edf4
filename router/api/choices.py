"""The choices of one generation request: tokens of their requests in, deltas of text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from headrace.request import FinishReason, PromptLogprobs, Request, Token
from router.api.generation import GenerationRequest
from router.requests.driver import Ended, Output, RequestDriver
from router.requests.events import Show, ShowPrompt
from router.text.text_stream import TextDelta, TextStream
from router.text.tokens import ModelTokens


class Choice:
    """The text of one request's answer, after its prompt if the client wants an echo."""

    def __init__(self, index: int, generation: GenerationRequest, tokens: ModelTokens) -> None:
        self.index = index
        self.request: Request = generation.requests[index]
        self._echo = generation.prompt_of(index).text if generation.echo else ""
        self._prompt_detokenizer = tokens.detokenizer()
        self._prompt_offset = 0
        detokenizer = tokens.detokenizer(self.request.tokens)
        self.text = TextStream(detokenizer, self.request.sampling, generation.stops, tokens.eos_ids, len(self._echo))

    def prompt_delta(self, logprobs: PromptLogprobs) -> TextDelta:
        """The next tokens of the echoed prompt with their log-probabilities; its whole text comes with the first."""
        prompt, tokens, offsets = self.request.tokens, [], []
        if logprobs.start == 1:
            tokens.append(Token(prompt[0]))
        tokens += [Token(prompt[logprobs.start + i], logprobs.of(i)) for i in range(len(logprobs.logprobs))]
        for token in tokens:
            offsets.append(self._prompt_offset)
            self._prompt_offset += len(self._prompt_detokenizer.push(token.id))
        return TextDelta(self._take_echo(), tuple(tokens), tuple(offsets))

    def text_delta(self, tokens: list[Token]) -> TextDelta:
        """The text of more tokens, after the echoed prompt if that has not been shown."""
        delta = self.text.push(tokens)
        return TextDelta(self._take_echo() + delta.text, delta.tokens, delta.offsets)

    def last_delta(self) -> TextDelta:
        """The text still held back at the end."""
        return TextDelta(self._take_echo() + self.text.finish())

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


class OutputQueue:
    """Outputs of several requests for one reader, each with its choice's index.

    The reader takes all that have gathered at once: a slow client gets longer deltas, not more of them.
    """

    def __init__(self) -> None:
        self._items: list[tuple[int, Output]] = []
        self._filled = asyncio.Event()

    def put(self, index: int, output: Output) -> None:
        self._items.append((index, output))
        self._filled.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Non-empty lists of outputs, in order, without end."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            items, self._items = self._items, []
            yield items


class Choices:
    """All choices of one generation request. The caller appends each one's driver to `drivers`, in order."""

    def __init__(self, generation: GenerationRequest, tokens: ModelTokens) -> None:
        self._generation = generation
        self._queue = OutputQueue()
        self.all = [Choice(index, generation, tokens) for index in range(len(generation.requests))]
        self.drivers: list[RequestDriver] = []

    def output_to(self, index: int) -> Callable[[Output], None]:
        """The function that takes the outputs of one choice's request."""
        return partial(self._queue.put, index)

    async def deltas(self) -> AsyncIterator[tuple[Choice, TextDelta, FinishReason | None]]:
        """Deltas as they come, each choice's last with its finish reason; raises the ApiError of a failed request."""
        left = len(self.all)
        async for batch in self._queue.batches():
            tokens: dict[int, list[Token]] = {}
            for index, output in batch:
                choice = self.all[index]
                match output:
                    case Show(shown):
                        tokens.setdefault(index, []).extend(shown)
                    case ShowPrompt(logprobs):
                        yield choice, choice.prompt_delta(logprobs), None
                    case Ended(failure):
                        if index in tokens:
                            yield choice, choice.text_delta(tokens.pop(index)), None
                        if failure is not None:
                            raise failure
                        left -= 1
                        yield choice, choice.last_delta(), self._finish_reason(choice)
            for index, gathered in tokens.items():
                choice = self.all[index]
                yield choice, choice.text_delta(gathered), None
                if choice.text.stop_found:
                    await self.drivers[index].stop()
            if left == 0:
                return

    def _finish_reason(self, choice: Choice) -> FinishReason:
        finish = self.drivers[choice.index].life.finish
        return FinishReason.STOP if choice.text.stop_found or finish is None else finish

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. A prompt with several choices counts once, with the cached tokens of its first choice."""
        prompts = [self.drivers[i].life for i in range(0, len(self.drivers), self._generation.choices_per_prompt)]
        num_prompt = sum(life.request.num_prompt_tokens for life in prompts)
        num_generated = sum(choice.text.num_tokens for choice in self.all)
        cached = sum(life.report.cached_tokens(life.request.num_prompt_tokens) for life in prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._generation.report:
            reports = [driver.life.report.json() for driver in self.drivers]
            usage["headrace"] = reports[0] if len(reports) == 1 else reports
        return usage
