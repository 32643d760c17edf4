"""The bodies that clients send. Types and ranges are checked here; what needs the model is not.

Unknown fields are ignored, as clients send many; inside `headrace` an unknown key is an error. A field
that would change the answer and is not supported is refused, not ignored.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from router.errors import ApiError, bad_request

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class HeadraceOptions(_Body):
    """Our own part of a request. `checkpoint_at`: token positions that a later prompt will share."""

    report: bool = False
    checkpoint_at: list[Annotated[int, Field(ge=1, lt=2**32)]] = Field(default=[], max_length=1024)
    salt: Annotated[str, Field(max_length=1024)] = ""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                nearest = get_close_matches(str(key), cls.model_fields, n=1, cutoff=0)[0]
                raise ValueError(f"unknown key {key!r}: did you mean {nearest!r}?")
        return value


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What chat and completions have in common; None is the default, as if the field were absent."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    headrace: HeadraceOptions | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

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
        """`stop` as a list, whatever the client sent."""
        return self.stop if isinstance(self.stop, list) else []


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message; unknown fields (tool calls and the like) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As a template expects it: the content one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice: only 'auto' and 'none' are supported")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported; leave it out")
        return self


B = TypeVar("B", bound=GenerationBody)


def parse_body(cls: type[B], data: bytes) -> B:
    """The body, or ApiError (400) that names the first field that is wrong."""
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        raise _as_api_error(error) from None


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
