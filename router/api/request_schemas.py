"""The fields that the bodies of chats and completions share. What depends on the model is checked later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from router.api.body_schemas import Body, OpenBody, OwnBody, Whole, wrong_field
from router.api.structured_output import FormFields

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_BIASES = 1024
MAX_ALLOWED = 16384
MAX_BAD_WORDS = 128

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**32), Whole]
NonEmpty = {"type": "string", "minLength": 1}
StopString = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stop = Annotated[
    str | list[str] | None,
    WithJsonSchema(
        {"anyOf": [StopString, {"type": "array", "items": StopString, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
]

LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]


def check_stop_strings(stops: Iterable[str]) -> None:
    """Raises ValueError for an empty stop string, and for one that is too long."""
    for stop in stops:
        if not stop:
            raise ValueError("an empty stop string would stop everything; leave it out")
        if len(stop) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string of {len(stop)} characters: at most {MAX_STOP_LENGTH}")


class ObjectivesBody(OwnBody):
    """The times that a request should keep, in seconds; null: the operator's."""

    first_token_s: Annotated[float, Field(gt=0)] | None = None
    """From the request's arrival to its first token."""
    token_gap_s: Annotated[float, Field(gt=0)] | None = None
    """Between two tokens of the answer."""


class HeadraceOptions(OwnBody):
    """Headrace's own part of a request."""

    report: bool = False
    """Adds `headrace` to the usage: which nodes served the request, what they reused and what moved. A stream then
    ends with a usage chunk."""
    checkpoint_at: list[Annotated[int, Field(ge=1, lt=2**32), Whole]] = Field(default=[], max_length=1024)
    """Token positions up to which later prompts will be the same: hints where to keep a checkpoint of the state."""
    salt: Annotated[str, Field(max_length=1024)] = ""
    """Separates the prefix caches of tenants: requests share cached prefixes only with the same salt."""
    objectives: ObjectivesBody = ObjectivesBody()
    """Times to keep; nodes and plans are chosen by them, and a request that cannot keep them may be refused."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), Whole] | None = None
    """A waiting request goes before all with a higher number. Not below the client's own, which is the default."""


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Ends the stream with a chunk that holds the usage."""
    continuous_usage_stats: bool | None = None
    """Each chunk has the tokens of its prompt and of its choice so far as `usage`."""


class GenerationBody(FormFields, OpenBody):
    """The fields that chat and completions share; null is the default, as if the field were absent."""

    model: str | None = None
    """The served model's name, as in /v1/models."""
    max_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    """Tokens to generate at most. Default: the rest of the model's length for a chat, 16 for a completion."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token. Default: that of the model's generation_config.json, or 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this. Default: the model's, or 1."""
    top_k: Annotated[int, Field(ge=-1, lt=2**32), Whole] | None = None
    """Samples from this many most likely tokens; 0 and -1: from all. Default: the model's, or 0."""
    min_p: Probability | None = None
    """Drops tokens less likely than this share of the most likely token's probability. Default: the model's, or 0."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Whole] | None = None
    """Repeats an answer: choice i of a request draws with `seed + i`. Default: random."""
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    """Names the conversation: among nodes that serve it equally well, one goes first that has served it before."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones. Default as above,
    or 1."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the answer has. Default 0."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time that the answer has it. Default 0."""
    stop: Stop = None
    """Strings that end the answer and are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    """Token ids that end the answer, beside the model's own."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**32), Whole] | None = None
    """Tokens before which nothing but `max_tokens` ends the answer. Default 0."""
    ignore_eos: bool | None = None
    """Generates past the model's end-of-sequence tokens. Default false."""
    return_token_ids: bool | None = None
    """Adds `token_ids`, the ids of the generated tokens, to each choice. Default false."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None
    """Choices for each prompt. Default 1."""
    stream: bool | None = None
    """Answers with server-sent events. Default false."""
    stream_options: StreamOptions | None = None
    headrace: HeadraceOptions | None = None
    logit_bias: LogitBias = None
    """Added to the logits of tokens, by their ids as strings, before all else: -100 to 100."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    """The only tokens that the answer may have."""
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    """Words that the answer must not have, compared token by token, with and without a space before them."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Whole] | None = None
    """Keeps this many tokens of a longer prompt, the last ones; -1: as many as fit the model beside `max_tokens`."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    """Adds the log-probability of each token of the prompt, and of this many most likely ones. Not in a stream."""
    include_stop_str_in_output: bool | None = None
    """Ends the text with the stop string or stop token that was found, instead of before it. Default false."""
    skip_special_tokens: bool | None = None
    """Leaves special tokens out of the text. Default true."""

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings: at most {MAX_STOPS}")
        check_stop_strings(stops)
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _token_biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and len(value) > MAX_BIASES:
            raise ValueError(f"{len(value)} biases: at most {MAX_BIASES}")
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"{key!r:.40} is no token id; use ids as /tokenize lists them, as strings")
        return value

    @model_validator(mode="after")
    def _prompt_fields(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise wrong_field("prompt_logprobs", "prompt_logprobs are not part of a stream; use stream: false")
        if self.truncate_prompt_tokens == 0:
            raise wrong_field("truncate_prompt_tokens", "truncate_prompt_tokens 0: keep at least 1 token")
        return self

    @property
    def stops(self) -> list[str]:
        """`stop` as a list, also if the client sent one string."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(key): value for key, value in (self.logit_bias or {}).items()}
