"""The body of a completion, as /openapi.json describes it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from router.api.body_schemas import Whole, wrong_field
from router.api.request_schemas import MAX_CHOICES, MAX_LOGPROBS, GenerationBody, NonEmpty
from router.api.unsupported_fields import FOR_COMPLETIONS

TokenIds = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
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
NoSuffix = Annotated[str | None, WithJsonSchema({"enum": ["", None]})]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported = FOR_COMPLETIONS

    prompt: PromptInput
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Puts the prompt before the answer, with its log-probabilities if `logprobs` is given. Default false."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    """Adds each token's log-probability and this many most likely tokens at its position."""
    add_special_tokens: bool | None = None
    """The tokenizer adds its own special tokens to a prompt of text. Default true."""
    suffix: NoSuffix = None
    """Not supported: empty."""
    best_of: Annotated[int, Whole] | None = None
    """Not supported: equal to `n`."""

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.suffix:
            raise wrong_field("suffix", "suffix is not supported; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise wrong_field("best_of", "best_of other than n is not supported; leave it out")
        if self.echo and self.logprobs is not None and self.prompt_logprobs not in (None, self.logprobs):
            raise wrong_field("prompt_logprobs", "prompt_logprobs with echo and logprobs: give the same number")
        return self
