"""The choices of one generation request: tokens of their requests in, deltas of text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from headrace.request import FinishReason, PromptLogprobs, Request, Token
from router.api.answer_writer import AnswerUsage, ChoiceEnd
from router.api.generation import GenerationRequest
from router.api.logprobs import SLICE_NUMBERS
from router.api.output_queue import OutputQueue
from router.requests import events as ev
from router.requests.driver import RequestDriver
from router.requests.outputs import Ended, Output
from router.text.answer.parts import CallStart
from router.text.text_stream import TextDelta, TextStream, joined
from router.text.tokens import ModelTokens

TOKEN_BYTES = 128
ALTERNATIVE_BYTES = 192
NUMBER_BYTES = 32
"""Memory of a token, of each of its log-probabilities, and of each number of a packed part."""


class Choice:
    """The text of one request's answer, after its prompt if the client wants an echo."""

    def __init__(self, index: int, generation: GenerationRequest, tokens: ModelTokens) -> None:
        self.index = index
        self.request: Request = generation.requests[index]
        self._echo = generation.prompt_of(index).text if generation.echo else ""
        self._prompt_detokenizer = tokens.detokenizer()
        self._prompt_offset = 0
        answer = generation.answer
        self._parser = None if answer is None else answer.parser(partial(_call_id, generation.id, self))
        self._has_reasoning = answer is not None and answer.reasoning is not None
        self._num_reasoning_tokens = 0
        self.has_calls = False
        self.text = TextStream(
            tokens.detokenizer(
                self.request.tokens,
                () if answer is None else answer.markers,
                skip_special_tokens=generation.skip_special_tokens,
            ),
            self.request.sampling,
            generation.stops,
            tokens.eos_ids,
            len(self._echo),
            generation.include_stop,
        )

    def prompt_deltas(self, shown: ShownPrompt) -> Iterator[TextDelta]:
        """The next tokens of the echoed prompt with their log-probabilities; its whole text comes with the first.

        A delta has at most SLICE_NUMBERS of them, so that making it takes the event loop little time.
        """
        logprobs, echo = shown.logprobs, shown.echo
        first_token = [Token(self.request.tokens[0])] if logprobs.start == 1 else []
        step = max(1, SLICE_NUMBERS // (1 + logprobs.num_top))
        for start in range(logprobs.start, max(logprobs.end, logprobs.start + 1), step):
            part = logprobs.between(start, min(start + step, logprobs.end))
            ids = self.request.tokens[part.start : part.end]
            tokens = [*first_token, *(Token(token_id, part.of(i)) for i, token_id in enumerate(ids))]
            yield TextDelta(echo, tuple(tokens), tuple(self._prompt_offsets(tokens)), is_prompt=True)
            first_token, echo = [], ""

    def _prompt_offsets(self, tokens: Sequence[Token]) -> Iterator[int]:
        for token in tokens:
            yield self._prompt_offset
            self._prompt_offset += len(self._prompt_detokenizer.push(token.id))

    def shown_prompt(self, logprobs: PromptLogprobs) -> ShownPrompt:
        """The prompt's log-probabilities with the text that they are shown with."""
        return ShownPrompt(self._take_echo(), logprobs)

    def text_delta(self, tokens: Sequence[Token]) -> TextDelta:
        """The text of more tokens, after the echoed prompt if that has not been shown."""
        if self._parser is not None:
            # One by one: reasoning's tokens are counted, and none is shown after the last call.
            return joined([self._parsed(self.text.push((token,))) for token in tokens if not self.is_complete])
        delta = self.text.push(tokens)
        return delta._replace(text=self._take_echo() + delta.text) if self._echo else delta

    def _parsed(self, delta: TextDelta) -> TextDelta:
        assert self._parser is not None
        was_reasoning = self._parser.is_reasoning
        parts = self._parser.push(delta.text)
        self._num_reasoning_tokens += was_reasoning and self._parser.is_reasoning
        self.has_calls = self.has_calls or any(isinstance(part, CallStart) for part in parts)
        return TextDelta(delta.text, delta.tokens, delta.offsets, tuple(parts))

    def last_delta(self) -> TextDelta:
        """The text still held back at the end."""
        if self._parser is None:
            return TextDelta(self._take_echo() + self.text.finish())
        delta = self._parsed(TextDelta(self.text.finish()))
        return delta._replace(parsed=(*delta.parts, *self._parser.finish()))

    @property
    def is_complete(self) -> bool:
        """True once no more text follows, whatever the node generates."""
        return self.text.stop_found is not None or (self._parser is not None and self._parser.is_complete)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far, without its markers; None if its text is not known from the rest."""
        return self._num_reasoning_tokens if self._has_reasoning else None

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


@dataclass(frozen=True)
class ShownPrompt:
    """A part of the scored prompt, still packed, and the text to echo with it."""

    echo: str
    logprobs: PromptLogprobs


Shown = TextDelta | ShownPrompt | Ended
Show = Callable[[int, TextDelta], bool]
"""Shows a choice's delta to the client at once; returns False if that has to wait."""


class ChoiceSink:
    """Takes the outputs of one choice's request as they come: text is made and stop strings are found here, whether or
    not the client reads."""

    def __init__(self, choice: Choice, queue: OutputQueue[Shown], show: Show) -> None:
        self._choice = choice
        self._queue = queue
        self._show = show

    @property
    def is_complete(self) -> bool:
        return self._choice.is_complete

    @property
    def has_room(self) -> bool:
        return self._queue.has_room

    def put(self, output: Output) -> None:
        match output:
            case ev.Show(tokens):
                delta = self._choice.text_delta(tokens)
                if not (self._queue.is_awaited and self._show(self._choice.index, delta)):
                    self._queue.put(self._choice.index, delta, unread_bytes(delta.text, delta.tokens))
            case ev.ShowPrompt(logprobs):
                shown = self._choice.shown_prompt(logprobs)
                num_numbers = len(logprobs.logprobs) + 2 * len(logprobs.top_ids)
                self._queue.put(self._choice.index, shown, len(shown.echo) + NUMBER_BYTES * num_numbers)
            case Ended():
                self._queue.put(self._choice.index, output, 0)

    async def room(self) -> None:
        await self._queue.room()


def unread_bytes(text: str, tokens: Sequence[Token]) -> int:
    """About the memory of text and tokens until they are sent: their objects are larger than their JSON."""
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    num_alternatives = sum(1 + len(each.top) for each in logprobs)
    return len(text) + TOKEN_BYTES * len(tokens) + ALTERNATIVE_BYTES * num_alternatives


class Choices:
    """All choices of one generation request. The caller appends each one's driver to `drivers`, in order.

    max_unread_bytes   of all choices together, as `OutputQueue` bounds them
    show               asked for each delta of tokens that comes while the reader of `deltas` waits, who gets what it
                       does not show
    """

    def __init__(self, generation: GenerationRequest, tokens: ModelTokens, max_unread_bytes: int, show: Show) -> None:
        self._generation = generation
        self._show = show
        self._queue: OutputQueue[Shown] = OutputQueue(max_unread_bytes)
        self.all = [Choice(index, generation, tokens) for index in range(len(generation.requests))]
        self.drivers: list[RequestDriver] = []

    def sink_of(self, index: int) -> ChoiceSink:
        """The sink for the outputs of one choice's request."""
        return ChoiceSink(self.all[index], self._queue, self._show)

    async def deltas(self) -> AsyncIterator[tuple[Choice, TextDelta, ChoiceEnd | None]]:
        """Deltas as they come, each choice's last with its end; raises the ApiError of a failed request.

        A choice gives its place in the router back when its last delta was taken; the last choice's place is the
        caller's to give back, once the answer is delivered.
        """
        left = len(self.all)
        async for batch in self._queue.batches():
            gathered: dict[int, list[TextDelta]] = {}
            for index, shown in batch:
                choice = self.all[index]
                match shown:
                    case TextDelta():
                        gathered.setdefault(index, []).append(shown)
                    case ShownPrompt():
                        for delta in choice.prompt_deltas(shown):
                            yield choice, delta, None
                    case Ended(failure):
                        if index in gathered:
                            yield choice, joined(gathered.pop(index)), None
                        if failure is not None:
                            raise failure
                        left -= 1
                        yield choice, choice.last_delta(), self._end_of(choice)
                        if left == 0:
                            return
                        self.drivers[index].give_place_back()
            for index, deltas in gathered.items():
                yield self.all[index], joined(deltas), None

    def _end_of(self, choice: Choice) -> ChoiceEnd:
        stop, finish = choice.text.stop_found, self.drivers[choice.index].life.finish
        if not choice.is_complete and finish is FinishReason.STOP:
            return ChoiceEnd(finish, stop_token=choice.text.stop_token, has_calls=choice.has_calls)
        reason = FinishReason.STOP if choice.is_complete or finish is None else finish
        return ChoiceEnd(reason, stop, has_calls=choice.has_calls)

    def usage(self) -> AnswerUsage:
        """Tokens of all choices so far."""
        prompts = [self.drivers[i].life for i in range(0, len(self.drivers), self._generation.choices_per_prompt)]
        num_prompt = sum(life.request.num_prompt_tokens for life in prompts)
        num_generated = sum(choice.text.num_tokens for choice in self.all)
        cached = sum(life.report.cached_tokens(life.request.num_prompt_tokens) for life in prompts)
        counts = [choice.num_reasoning_tokens for choice in self.all if choice.num_reasoning_tokens is not None]
        usage = AnswerUsage(num_prompt, num_generated, cached, reasoning_tokens=sum(counts) if counts else None)
        if not self._generation.report:
            return usage
        reports = [driver.life.report.json() for driver in self.drivers]
        return replace(usage, report=reports[0] if len(reports) == 1 else reports)


def _call_id(answer_id: str, choice: Choice, index: int) -> str:
    """The id of a choice's call: the same wherever the answer goes on, and another one in the chat's next turn, also if
    the client gives all its requests one id."""
    name = f"{answer_id} {choice.request.num_prompt_tokens} {choice.index} {index}"
    return f"call_{blake2b(name.encode(), digest_size=12).hexdigest()}"
