"""The choices of one generation request side by side: outputs of their requests in, deltas of text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.request import FinishReason, Request, Token
from headrace.wire.messages import PromptLogprobs
from router.api.generation import GenerationRequest
from router.api.mailbox import Mailbox
from router.requests.driver import Ended, Output, RequestDriver
from router.requests.events import Show, ShowPrompt
from router.text.text_stream import TextDelta, TextStream
from router.text.tokens import ModelTokens


class Choice:
    """One request's answer, and the prompt before it where the client wants an echo."""

    def __init__(self, index: int, generation: GenerationRequest, tokens: ModelTokens) -> None:
        self.index = index
        self.request: Request = generation.requests[index]
        self._echo = generation.prompt_of(index).text if generation.echo else ""
        self._tokens = tokens
        detokenizer = tokens.detokenizer(self.request.tokens)
        self.answer = TextStream(detokenizer, self.request.sampling, generation.stops, tokens.eos_ids, len(self._echo))

    def prompt_delta(self, logprobs: PromptLogprobs) -> TextDelta:
        """The echoed prompt with its logprobs."""
        offsets, length, detokenizer = [], 0, self._tokens.detokenizer()
        for token in logprobs.tokens:
            offsets.append(length)
            length += len(detokenizer.push(token.id))
        return TextDelta(self._take_echo(), logprobs.tokens, tuple(offsets))

    def text_delta(self, tokens: list[Token]) -> TextDelta:
        """More text, after the echoed prompt if that is still to come."""
        delta = self.answer.push(tokens)
        return TextDelta(self._take_echo() + delta.text, delta.tokens, delta.offsets)

    def last_delta(self) -> TextDelta:
        """What was held back."""
        return TextDelta(self._take_echo() + self.answer.finish())

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


class Choices:
    """Reads what all requests show. `runs` are filled in by whoever starts the requests."""

    def __init__(self, generation: GenerationRequest, tokens: ModelTokens) -> None:
        self._generation = generation
        self._mailbox: Mailbox[tuple[int, Output]] = Mailbox()
        self.all = [Choice(index, generation, tokens) for index in range(len(generation.requests))]
        self.runs: list[RequestDriver] = []

    def inbox(self, index: int) -> Callable[[Output], None]:
        """Where a request's outputs go."""
        return lambda output: self._mailbox.put((index, output))

    async def deltas(self) -> AsyncIterator[tuple[Choice, TextDelta, FinishReason | None]]:
        """Pieces as they come, the last of each choice with its finish reason; raises a request's ApiError."""
        left = len(self.all)
        async for batch in self._mailbox.batches():
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
                if choice.answer.stop_found:
                    await self.runs[index].stop()
            if left == 0:
                return

    def _finish_reason(self, choice: Choice) -> FinishReason:
        finish = self.runs[choice.index].life.finish
        return FinishReason.STOP if choice.answer.stop_found or finish is None else finish

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage; a prompt with several choices counts once, cached tokens as its first choice had them."""
        prompts = [self.runs[i].life for i in range(0, len(self.runs), self._generation.choices_per_prompt)]
        num_prompt = sum(life.request.num_prompt_tokens for life in prompts)
        num_generated = sum(choice.answer.num_tokens for choice in self.all)
        cached = sum(life.report.cached_tokens(life.request.num_prompt_tokens) for life in prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._generation.report:
            reports = [run.life.report.json() for run in self.runs]
            usage["headrace"] = reports[0] if len(reports) == 1 else reports
        return usage
