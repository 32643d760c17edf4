"""The JSON bodies of requests, as /openapi.json describes them. What depends on the model is checked later.

Unknown fields are ignored, since clients send many; inside `headrace` an unknown key is an error. A field that
would change the answer and is not supported is refused, not ignored: see `router.api.unsupported_fields`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from router.api.unsupported_fields import FOR_CHATS, FOR_COMPLETIONS, Unsupported, refuse_unsupported, schema_of
from router.errors import ApiError, bad_request

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
NonEmpty = {"type": "string", "minLength": 1}
TokenIds = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Stop = Annotated[
    str | list[str] | None,
    WithJsonSchema(
        {"anyOf": [NonEmpty, {"type": "array", "items": NonEmpty, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
]
# A prompt may be a million token ids: RequestBuilder checks them far faster than a validator of each.
PromptInput = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                NonEmpty,
                TokenIds,
                {"type": "array", "items": NonEmpty, "minItems": 1, "maxItems": MAX_CHOICES},
                {"type": "array", "items": TokenIds, "minItems": 1, "maxItems": MAX_CHOICES},
            ]
        }
    ),
]
NoLogitBias = Annotated[
    dict[str, Any] | None, WithJsonSchema({"anyOf": [{"type": "object", "maxProperties": 0}, {"type": "null"}]})
]
TextFormat = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
                {"type": "null"},
            ]
        }
    ),
]
ToolChoice = Annotated[Any, WithJsonSchema({"enum": ["auto", "none", None]})]
NoSuffix = Annotated[str | None, WithJsonSchema({"enum": ["", None]})]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", use_attribute_docstrings=True)
    unsupported: ClassVar[dict[str, Unsupported]] = {}


class _OwnBody(_Body):
    """A part of a request that is Headrace's own: an unknown key is an error."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                nearest = get_close_matches(str(key), cls.model_fields, n=1, cutoff=0)[0]
                raise ValueError(f"unknown key {key!r}: did you mean {nearest!r}?")
        return value


class ObjectivesBody(_OwnBody):
    """The times that a request should keep, in seconds; null: the operator's."""

    first_token_s: Annotated[float, Field(gt=0)] | None = None
    """From the request's arrival to its first token."""
    token_gap_s: Annotated[float, Field(gt=0)] | None = None
    """Between two tokens of the answer."""


class HeadraceOptions(_OwnBody):
    """Headrace's own part of a request."""

    report: bool = False
    """Adds `headrace` to the usage: which nodes served the request, what they reused and what moved. A stream then
    ends with a usage chunk."""
    checkpoint_at: list[Annotated[int, Field(ge=1, lt=2**32)]] = Field(default=[], max_length=1024)
    """Token positions up to which later prompts will be the same: hints where to keep a checkpoint of the state."""
    salt: Annotated[str, Field(max_length=1024)] = ""
    """Separates the prefix caches of tenants: requests share cached prefixes only with the same salt."""
    objectives: ObjectivesBody = ObjectivesBody()
    """Times to keep; nodes and plans are chosen by them, and a request that cannot keep them may be refused."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """A waiting request goes before all with a higher number. Below 0 only where the operator allows it."""


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Ends the stream with a chunk that holds the usage."""
    continuous_usage_stats: Literal[False] | None = None
    """Not supported: false."""


class GenerationBody(_Body):
    """The fields that chat and completions share; null is the default, as if the field were absent."""

    model_config = ConfigDict(extra="allow")  # kept until `parse_body` has looked for unsupported ones

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds the unsupported fields, with the values that are no error."""
        schema = handler(core)
        described = handler.resolve_ref_schema(schema)
        described["properties"] |= schema_of(cls.unsupported)
        described.pop("additionalProperties", None)
        return schema

    model: str | None = None
    """The served model's name, as in /v1/models."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens to generate at most. Default: the rest of the model's length for a chat, 16 for a completion."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this. Default 1."""
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    """Samples from this many most likely tokens; 0 and -1: from all. Default 0."""
    min_p: Probability | None = None
    """Drops tokens less likely than this share of the most likely token's probability. Default 0."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Repeats an answer: choice i of a request draws with `seed + i`. Default: random."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones. Default 1."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the answer has. Default 0."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time that the answer has it. Default 0."""
    stop: Stop = None
    """Strings that end the answer and are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    """Token ids that end the answer, beside the model's own."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Tokens before which nothing but `max_tokens` ends the answer. Default 0."""
    ignore_eos: bool | None = None
    """Generates past the model's end-of-sequence tokens. Default false."""
    return_token_ids: bool | None = None
    """Adds `token_ids`, the ids of the generated tokens, to each choice. Default false."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices for each prompt. Default 1."""
    stream: bool | None = None
    """Answers with server-sent events. Default false."""
    stream_options: StreamOptions | None = None
    headrace: HeadraceOptions | None = None
    logit_bias: NoLogitBias = None
    """Not supported: empty."""
    response_format: TextFormat = None
    """Only `{"type": "text"}` is supported."""

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings: at most {MAX_STOPS}")
        if "" in stops:
            raise ValueError("an empty stop string would stop everything; leave it out")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _no_logit_bias(cls, value: dict[str, Any] | None) -> None:
        if value:
            raise ValueError("not supported; leave it out")

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> None:
        if value is not None and value.get("type") != "text":
            raise ValueError(f"type {value.get('type')!r} is not supported; use 'text'")

    @property
    def stops(self) -> list[str]:
        """`stop` as a list, also if the client sent one string."""
        return self.stop if isinstance(self.stop, list) else []


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message; unknown fields (tool calls and the like) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    """As the model's chat template names it: `system`, `user`, `assistant`, `tool`."""
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as a template expects it: the content is one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unsupported = FOR_CHATS

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The chat so far."""
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """As `max_tokens`, and before it."""
    logprobs: bool | None = None
    """Adds each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The most likely tokens at each position; needs `logprobs`."""
    tools: list[dict[str, Any]] | None = None
    """Passed to the chat template; calls come back as text."""
    tool_choice: ToolChoice = None
    """`none` hides the tools from the template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice: only 'auto' and 'none' are supported")
        return self


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported = FOR_COMPLETIONS

    prompt: PromptInput
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Puts the prompt before the answer, with its log-probabilities if `logprobs` is given. Default false."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Adds each token's log-probability and this many most likely tokens at its position."""
    suffix: NoSuffix = None
    """Not supported: empty."""
    best_of: int | None = None
    """Not supported: equal to `n`."""

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported; leave it out")
        return self


class RoleBody(_Body):
    """A node's new role."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode", "both"]
    """The work for which the node is preferred from now on."""


class DrainBody(_Body):
    """How a node is drained."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds after which requests that could not move begin again on other nodes."""
    keep: bool = False
    """The node stays, without work; else it stops."""


B = TypeVar("B", bound=_Body)


def parse_body(cls: type[B], data: bytes) -> B:
    """The body, or ApiError (400) that names the first wrong or unsupported field."""
    try:
        body = cls.model_validate_json(data)
    except ValidationError as error:
        raise _as_api_error(error) from None
    refuse_unsupported(body.model_extra, cls.unsupported)
    return body


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']}")
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return bad_request(message)
    # For a union, pydantic appends the member that it tried; clients know field names only.
    names = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    names = [name for name in names if name not in ("str", "TextPart")]
    field = ".".join(names)
    shown = first["input"]
    value = "" if isinstance(shown, dict | list) or first["type"] == "missing" else f" {shown!r:.100}"
    return bad_request(f"{field}{value}: {message}", names[0])
