"""The service behind all endpoints that generate, without a web framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from headrace.request import FinishReason
from headrace.wire.node_messages import Role
from router.api.answer_writer import ANSWER_END, AnswerWriter, ChoiceEnd, RenderedDelta, WriterOf
from router.api.choices import Choices, Show
from router.api.generation import GenerationRequest
from router.api.logprobs import num_logprobs, slices
from router.errors import ApiError, bad_request, no_node
from router.http.body_writer import BodyWriter
from router.requests.admission import Admission
from router.requests.client import Client
from router.requests.context import RouterContext
from router.requests.driver import RequestDriver
from router.requests.siblings import Siblings
from router.text.text_stream import TextDelta
from router.text.tokens import ModelTokens

FEW_NUMBERS = 64  # log-probabilities that are rendered sooner than a thread has taken them over
MANY_PARTS = 32  # of answers that are joined in a thread
EVENT_BYTES = 16 << 10  # sent before the rest of a long delta is rendered
WRITE_GRACE_S = 1.0  # for the event that says that the request's own time is over


class CompletionService:
    """Answers generation requests with JSON or server-sent events, as the writer of each one's API shapes them."""

    def __init__(self, tokens: ModelTokens, context: RouterContext, admission: Admission) -> None:
        self._tokens = tokens
        self._context = context
        self._admission = admission
        self._rendering = asyncio.Lock()

    @property
    def answer_timeout_s(self) -> float:
        """Seconds from the end of a request's body until its answer must be written."""
        return self._context.config.request_timeout_s + WRITE_GRACE_S

    def check_line(self, client: Client) -> None:
        """Raises ApiError (429) if not even one more request of this client fits, or its rate is used up: asked before
        the body is read."""
        client.check_rate()
        self._admission.check_line(client.name, client.priority)

    async def answer(self, generation: GenerationRequest, writer_of: WriterOf, client: Client) -> AsyncGenerator[bytes]:
        """Runs a generation request and yields its whole answer, then nothing, then ANSWER_END; raises ApiError.

        The reader asks for the end once the client has taken what comes before: an answer that is not read keeps its
        place in the router, and a client that has all of it finds everything given back.
        """
        writer = writer_of(generation, self._tokens.token_bytes)
        deltas: list[list[RenderedDelta]] = [[] for _ in generation.requests]
        ends = [ChoiceEnd(FinishReason.STOP)] * len(generation.requests)
        num_kept = 0
        async with self._running(generation, client, _show_nothing) as choices:
            async for choice, delta, end in choices.deltas():
                num_kept += 0 if delta.is_prompt else num_logprobs(delta.tokens)
                self._check_kept(num_kept)
                async for rendered in self._rendered(writer, choice.index, delta):
                    deltas[choice.index].append(rendered)
                if end is not None:
                    ends[choice.index] = end
            parts, usage = list(zip(deltas, ends, strict=True)), choices.usage()
            if sum(map(len, deltas)) < MANY_PARTS:
                yield writer.whole(parts, usage)
            else:
                yield await asyncio.to_thread(writer.whole, parts, usage)
            yield b""
        yield ANSWER_END

    async def stream(
        self, generation: GenerationRequest, writer_of: WriterOf, client: Client, body: BodyWriter | None = None
    ) -> AsyncGenerator[bytes]:
        """Runs a generation request and yields server-sent events. An ApiError is raised before the first event; after
        it, the error is the last event.

        body   gets events that come while the reader waits for one, and has sent all before it
        """
        writer = writer_of(generation, self._tokens.token_bytes)
        begun: set[int] = set()  # choices that have sent something
        is_fast = all(request.sampling.logprobs is None for request in generation.requests)

        def show(index: int, delta: TextDelta) -> bool:
            if body is None or not is_fast or index not in begun or not body.may_write:
                return False
            if data := writer.delta(index, writer.render(index, delta)):
                body.write(data)
            return True

        try:
            async with self._running(generation, client, show) as choices:
                async for choice, delta, end in choices.deltas():
                    data = b"" if choice.index in begun else writer.begin(choice.index)
                    async for rendered in self._rendered(writer, choice.index, delta):
                        data += writer.delta(choice.index, rendered)
                        if len(data) > EVENT_BYTES:
                            begun.add(choice.index)
                            yield data
                            data = b""
                    if end is not None:
                        data += writer.finish(choice.index, end)
                    if data:
                        begun.add(choice.index)
                        yield data
                last = writer.end(choices.usage())
            yield last
        except ApiError as error:
            if not begun:
                raise
            yield writer.failure(error)

    def _check_kept(self, num_logprobs: int) -> None:
        limit = self._context.config.max_answer_logprobs
        if num_logprobs > limit:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the answer has more than {limit} log-probabilities, alternatives included (max_answer_logprobs): "
                "stream it, or ask for fewer choices, tokens or alternatives",
                code="answer_too_large",
                param="logprobs",
            )

    def _check_scores(self, generation: GenerationRequest) -> None:
        limit, wanted = self._context.config.max_prompt_logprobs, 0
        for request in generation.requests:
            if request.sampling.prompt_logprobs is not None:
                wanted += request.num_prompt_tokens * (request.sampling.prompt_logprobs + 1)
        if wanted > limit:
            raise bad_request(
                f"prompt_logprobs, or echo with logprobs: the prompts have {wanted}, alternatives included; at most "
                f"{limit} in one request (max_prompt_logprobs): shorten the prompts, or ask for fewer alternatives",
                "logprobs",
            )

    async def _rendered(self, writer: AnswerWriter, index: int, delta: TextDelta) -> AsyncGenerator[RenderedDelta]:
        """The delta in slices, each rendered in a thread if that takes long, and one of all answers' at a time."""
        for part in slices(delta):
            if num_logprobs(part.tokens) <= FEW_NUMBERS:
                yield writer.render(index, part)
            else:
                async with self._rendering:
                    rendered = await asyncio.to_thread(writer.render, index, part)
                yield rendered

    def _check_ids(self, generation: GenerationRequest) -> None:
        if any(request.request_id in self._context.table for request in generation.requests):
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"{generation.id}: a request with this x-request-id is being answered; wait for its end, or choose "
                "another id",
                code="request_id_in_use",
                retry_after_s=1,
            )

    @asynccontextmanager
    async def _running(self, generation: GenerationRequest, client: Client, show: Show) -> AsyncIterator[Choices]:
        """Admits and runs the requests; leaving cancels those still running."""
        self._check_scores(generation)
        self._check_nodes()
        self._check_ids(generation)
        config = self._context.config
        objectives = generation.objectives.over(config.objectives)
        choices = Choices(generation, self._tokens, self._context.config.max_unread_bytes, show)
        async with AsyncExitStack() as stack:
            count, per_prompt = len(generation.requests), generation.choices_per_prompt
            followers = [index for index in range(count) if index % per_prompt]
            permits = self._admission.acquire(
                client.name,
                generation.requests,
                followers=followers,
                priority=client.priority_of(generation.priority),
                first_token_s=objectives.first_token_s if config.on_missed_objectives == "refuse" else None,
                charge=client.charge,
            )
            for permit in permits:
                stack.callback(permit.release)
            siblings = [Siblings(permits[i + 1 : i + per_prompt]) for i in range(0, count, per_prompt)]
            for choice, permit in zip(choices.all, permits, strict=True):
                sink = choices.sink_of(choice.index)
                group = siblings[choice.index // per_prompt]
                driver = RequestDriver(
                    self._context, choice.request, permit, sink, group, objectives, generation.session
                )
                choices.drivers.append(await stack.enter_async_context(driver))
            yield choices

    def _check_nodes(self) -> None:
        """Raises ApiError (503) unless a decode node is there, or one that was lost is expected in time."""
        nodes, now_s = self._context.nodes, self._context.clock()
        awaited = nodes.awaited(Role.DECODE)
        is_late = awaited and awaited[0].expected_at_s > now_s + self._context.config.request_timeout_s
        if not nodes.live(Role.DECODE) and (is_late or not nodes.may_come(Role.DECODE)):
            raise no_node(Role.DECODE, awaited, now_s)


def _show_nothing(index: int, delta: TextDelta) -> bool:
    return False
