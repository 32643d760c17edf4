"""Generation requests: a client's HTTP request as token streams for the nodes, with sampling and limits."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.request import Request
from headrace.token_array import TokenArray
from router.api.body_schemas import whole_numbers
from router.api.chat_grammar import chat_grammar
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.request_schemas import MAX_CHOICES, GenerationBody, HeadraceOptions
from router.api.sampling import check_ids, sampling_of
from router.errors import bad_request
from router.routing.plan import Objectives
from router.text.answer.answer_format import AnswerFormat, schemas_of
from router.text.chat_template import ChatTemplate
from router.text.literal_tokens import NotLoaded
from router.text.message_ends import Mark
from router.text.tokens import ChatPrompt, ModelTokens

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_UINT64 = 2**64


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what `echo` shows; it is empty for a chat, and for token ids that are not echoed."""

    tokens: TokenArray
    text: str
    boundaries: tuple[int, ...] = ()

    def without(self, num_tokens: int) -> Prompt:
        """The prompt without its first tokens."""
        if not num_tokens:
            return self
        boundaries = tuple(each - num_tokens for each in self.boundaries if each > num_tokens)
        return replace(self, tokens=self.tokens[num_tokens:], boundaries=boundaries)


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request: `choices_per_prompt` entries in `requests` for each prompt, in order.

    A `headrace.request.Request` is one stream of tokens on the nodes; a client asks for several at once with a list of
    prompts or with `n`.

    id_prefix   the beginning of `id`, by which an API names its answers
    continuous_usage  each chunk of a stream has the usage so far
    include_stop  a stop string that is found is part of the text, and so is the text of a stop token
    is_seeded   the client gave the seed
    objectives  those that the client gave
    priority    that which the client asked for
    session     conversation to which it belongs, by its `prompt_cache_key` or a header; empty: none that is known
    answer      how a chat's answers are split into parts; None: they are not
    """

    id: str
    id_prefix: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    choices_per_prompt: int
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    shows_prompt_logprobs: bool
    report: bool
    echo: bool
    is_seeded: bool
    objectives: Objectives
    priority: int | None
    session: str = ""
    answer: AnswerFormat | None = None

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that a choice answers."""
        return self.prompts[index // self.choices_per_prompt]

    def held_to(self, grammar: str | None) -> GenerationRequest:
        """The same request, whose answers obey a grammar; None: any answer will do."""
        held = (replace(each, sampling=replace(each.sampling, grammar=grammar)) for each in self.requests)
        return self if grammar is None else replace(self, requests=tuple(held))


class RequestBuilder:
    """Builds generation requests for one model. `max_model_tokens` returns the nodes' limit, None without nodes."""

    def __init__(
        self,
        model: str,
        tokens: ModelTokens,
        max_model_tokens: Callable[[], int | None],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._max_model_tokens = max_model_tokens
        self._draw_seed = draw_seed

    def chat(self, body: ChatBody, id_prefix: str = "chatcmpl-", marks: Sequence[Mark] = ()) -> GenerationRequest:
        """Builds a chat's generation request, with boundaries at the client's marks; raises ApiError (400) for what
        this model cannot do."""
        if body.max_tokens == 0 or body.max_completion_tokens == 0:
            raise bad_request("max_tokens 0: a chat must have at least 1", "max_tokens")
        chat = self._rendered(body)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        # The ends of messages cost far more than this check: refuse a chat that no node can hold before that.
        num_cut = self._num_cut(body, len(chat.tokens), wanted)
        self._max_tokens(len(chat.tokens) - num_cut, wanted, "messages")
        prompt = Prompt(chat.tokens, "", chat.boundaries(marks)).without(num_cut)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = chat_grammar(body, self._tokens, chat.opens_reasoning, lambda: self._grammar(body))
        generation = self._build(
            body,
            [prompt],
            "messages",
            wanted,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            id_prefix=id_prefix,
        )
        return replace(generation.held_to(grammar), answer=self._answer_format(body, chat))

    def _answer_format(self, body: ChatBody, chat: ChatPrompt) -> AnswerFormat:
        formats, tools = self._tokens.formats, body.offered_tools
        return AnswerFormat(
            formats.calls if tools else None,
            formats.reasoning,
            chat.opens_reasoning,
            schemas_of(tools),
            body.max_calls,
        )

    def chat_tokens(self, body: ChatBody) -> Sequence[int]:
        """The tokens of a chat's prompt; raises ApiError (400) for one that no node can hold."""
        tokens = self._rendered(body).tokens
        self._check_length(len(tokens), "messages")
        return tokens

    def text_tokens(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The tokens of a text; raises ApiError (400) for one that no node can hold."""
        self._refuse_certainly_too_long(text, "prompt")
        tokens = self._tokens.encode(text, add_special_tokens=add_special_tokens)
        self._check_length(len(tokens), "prompt")
        return tokens

    def token_text(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens included; raises ApiError (400) for more than a node can hold, and for
        ids outside the vocabulary."""
        self._check_length(len(ids), "tokens")
        check_ids(ids, self._tokens.vocab_size, "tokens")
        return self._tokens.decode(ids, skip_special_tokens=False)

    def _check_length(self, length: int, field: str) -> None:
        limit = self.limit
        if limit is not None and length > limit:
            raise bad_request(
                f"{field} of {length} tokens {_exceed(limit)}; shorten {field}", field, "context_length_exceeded"
            )

    def _rendered(self, body: ChatBody) -> ChatPrompt:
        template = self._tokens.chat_template(body.chat_template)
        return self._tokens.render_chat(
            [message.for_template() for message in body.messages],
            template=template,
            tools=body.offered_tools,
            variables=_variables(body, template),
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt is not False,
            continues_final=bool(body.continue_final_message),
            check=lambda text: self._check_text(body, text, "messages"),
        )

    def completion(self, body: CompletionBody) -> GenerationRequest:
        """Builds a completion's generation request; raises ApiError (400) for what this model cannot do."""
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens 0: needs echo, or there is nothing to answer", "max_tokens")
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = self._grammar(body)
        prompts = [self._cut(body, prompt, wanted) for prompt in self._prompts(body)]
        generation = self._build(
            body,
            prompts,
            "prompt",
            wanted,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
            echo=bool(body.echo),
            id_prefix="cmpl-",
        )
        return generation.held_to(grammar)

    def _grammar(self, body: GenerationBody) -> str | None:
        """The grammar of the answers; raises ApiError (400), and NotLoaded where compiling it would hold others up."""
        if body.has_form and self._tokens.is_for_small_bodies:
            raise NotLoaded
        for name in ("allowed_token_ids", "bad_words"):
            if body.has_form and getattr(body, name):
                raise bad_request(f"{name} beside a form of the answer could leave no token: leave one out", name)
        return body.grammar_text()

    def _prompts(self, body: CompletionBody) -> list[Prompt]:
        """The prompts in a completion's `prompt`: text, token ids, or a list of either."""
        value, echo = whole_numbers(body.prompt), bool(body.echo)
        if isinstance(value, str):
            return [self._text_prompt(body, value)]
        if isinstance(value, list) and value:
            kinds = _kinds(value)
            if kinds == {int}:
                return [self._token_prompt(value, echo)]
            if len(value) > MAX_CHOICES:
                raise bad_request(f"prompt: {len(value)} prompts; at most {MAX_CHOICES}", "prompt")
            if kinds == {str}:
                return [self._text_prompt(body, text) for text in value]
            if kinds == {list}:
                lists = [whole_numbers(item) for item in value]
                if all(_kinds(item) <= {int} for item in lists):
                    return [self._token_prompt(item, echo) for item in lists]
        if value == []:
            raise bad_request("prompt is empty: give at least one token", "prompt", "empty_prompt")
        raise bad_request("prompt: give text, token ids, or a list of either", "prompt")

    def _cut(self, body: CompletionBody, prompt: Prompt, wanted: int) -> Prompt:
        """The prompt without the tokens that `truncate_prompt_tokens` leaves out; an echo shows what is left."""
        num_cut = self._num_cut(body, len(prompt.tokens), wanted)
        rest = prompt.without(num_cut)
        return replace(rest, text=self._tokens.decode(rest.tokens)) if num_cut and body.echo else rest

    def _num_cut(self, body: GenerationBody, length: int, wanted: int | None) -> int:
        """Tokens that `truncate_prompt_tokens` leaves out of a prompt of `length`."""
        kept = body.truncate_prompt_tokens
        if kept is None:
            return 0
        if kept == -1:
            limit = self.limit
            kept = length if limit is None else max(1, limit - (1 if wanted is None else wanted))
        return max(0, length - kept)

    def _check_text(self, body: GenerationBody, text: str, field: str) -> None:
        """Refuses a text that is certainly too long, unless it is to be cut."""
        if body.truncate_prompt_tokens is None:
            self._refuse_certainly_too_long(text, field)

    def _text_prompt(self, body: CompletionBody, text: str) -> Prompt:
        self._check_text(body, text, "prompt")
        add_special_tokens = body.add_special_tokens is not False
        return Prompt(TokenArray.of(self._tokens.encode(text, add_special_tokens=add_special_tokens)), text)

    def _token_prompt(self, ids: Sequence[int], echo: bool) -> Prompt:
        check_ids(ids, self._tokens.vocab_size, "prompt")
        return Prompt(TokenArray.of(ids), self._tokens.decode(ids) if echo else "")

    def _build(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        field: str,
        wanted: int | None,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        id_prefix: str,
        echo: bool = False,
    ) -> GenerationRequest:
        generation_id = f"{id_prefix}{uuid.uuid4().hex}"
        own = body.headrace or HeadraceOptions()
        count = body.n or 1
        if count * len(prompts) > MAX_CHOICES:
            raise bad_request(f"n {count} for {len(prompts)} prompts: at most {MAX_CHOICES} choices", "n")
        first_seed = self._draw_seed() if body.seed is None else body.seed
        requests: list[Request] = []
        for prompt in prompts:
            max_tokens = self._max_tokens(len(prompt.tokens), wanted, field)
            boundaries = self._boundaries(prompt, own)
            sampling = sampling_of(body, self._tokens, max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
            for _ in range(count):
                name = f"{generation_id}-{len(requests)}"
                requests.append(
                    Request(name, prompt.tokens, len(prompt.tokens), sampling, own.salt.encode(), boundaries)
                )
        options = body.stream_options
        return GenerationRequest(
            id=generation_id,
            id_prefix=id_prefix,
            created=int(time.time()),
            model=self._model,
            prompts=tuple(prompts),
            requests=tuple(seeds_from(first_seed, requests)),
            choices_per_prompt=count,
            stops=tuple(body.stops),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            stream=bool(body.stream),
            return_token_ids=bool(body.return_token_ids),
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            include_usage=own.report or (options is not None and bool(options.include_usage)),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            report=own.report,
            echo=echo,
            is_seeded=body.seed is not None,
            objectives=Objectives(own.objectives.first_token_s, own.objectives.token_gap_s),
            priority=own.priority,
            session=body.prompt_cache_key or "",
        )

    @property
    def limit(self) -> int | None:
        """Tokens of prompt and answer together, at most; None if it is unknown."""
        return self._max_model_tokens() or self._tokens.max_model_tokens

    def _refuse_certainly_too_long(self, text: str, field: str) -> None:
        """Raises ApiError for a text that exceeds the model's length by far, before the whole of it is encoded."""
        limit = self.limit
        if limit is not None and (least := self._tokens.exceeds(text, limit)) is not None:
            raise bad_request(
                f"{field} of at least {least} tokens {_exceed(limit)}; shorten {field}",
                field,
                "context_length_exceeded",
            )

    def _max_tokens(self, length: int, wanted: int | None, field: str) -> int:
        """Number of tokens to generate after a prompt of `length`; raises ApiError if they do not fit the model."""
        if length == 0:
            raise bad_request(f"{field} is empty: give at least one token", field, "empty_prompt")
        limit = self.limit
        if limit is None:
            return DEFAULT_COMPLETION_TOKENS if wanted is None else wanted
        if length + (1 if wanted is None else wanted) > limit:
            asked = "" if wanted is None else f" and max_tokens {wanted}"
            raise bad_request(
                f"{field} of {length} tokens{asked} {_exceed(limit)}; "
                f"shorten {field}{' or lower max_tokens' if wanted else ''}",
                field,
                "context_length_exceeded",
            )
        return limit - length if wanted is None else wanted

    def _boundaries(self, prompt: Prompt, own: HeadraceOptions) -> tuple[int, ...]:
        for position in own.checkpoint_at:
            if position > len(prompt.tokens):
                raise bad_request(
                    f"headrace.checkpoint_at {position} lies beyond the prompt of {len(prompt.tokens)} tokens",
                    "headrace",
                )
        return tuple(sorted({*prompt.boundaries, *own.checkpoint_at}))


def _variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    """Variables of the chat template; raises ApiError (400) for an effort that it cannot ask for."""
    effort, knows = body.reasoning_effort, template.knows
    variables: dict[str, Any] = {}
    if effort is not None and knows("reasoning_effort"):
        variables["reasoning_effort"] = effort
    elif effort == "none" and knows("enable_thinking"):
        variables["enable_thinking"] = False
    elif effort not in (None, "medium"):
        raise bad_request(
            f"reasoning_effort {effort!r:.100}: this model's chat template knows no efforts; leave it out, or set "
            "what the template knows with chat_template_kwargs",
            "reasoning_effort",
        )
    return variables | (body.chat_template_kwargs or {})


def seeds_from(first: int, requests: Sequence[Request]) -> list[Request]:
    """The requests with seeds in a row from `first` on."""
    return [
        replace(request, sampling=replace(request.sampling, seed=(first + index) % _UINT64))
        for index, request in enumerate(requests)
    ]


def _kinds(values: Sequence[object]) -> set[type]:
    """Types of JSON values; bool is not int here. A prompt may have a million values."""
    return set(map(type, values))


def _exceed(limit: int) -> str:
    """Said of a prompt that is too long. Clients recognise OpenAI's words in it."""
    return f"exceed the model's length of {limit}: this model's maximum context length is {limit} tokens"
