"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from router.api.answering import Answering
from router.api.body_schemas import Body, checked_body, parse_body, whole_numbers
from router.api.chat_messages import ChatMessage
from router.api.chat_schemas import ChatBody
from router.api.openapi import parsing_route
from router.api.response_schemas import Detokenized, Tokenized
from router.parsing.body_parser import ServedModel

# There may be a million: the reader checks them far faster than a validator of each.
TokenList = Annotated[
    list[int],
    Field(strict=True),
    BeforeValidator(whole_numbers),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
]


class TokenizeBody(Body):
    """The body of POST /tokenize: `prompt`, or the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")
            ]
        }
    )

    model: str | None = None
    """The served model's name, as in /v1/models."""
    prompt: str | None = None
    """Text to encode."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """A chat, rendered by the model's chat template and then encoded."""
    tools: list[dict[str, Any]] | None = None
    """Tools of the chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    chat_template: str | None = None
    """As in a chat."""
    add_generation_prompt: bool | None = None
    """A chat ends with the beginning of an answer. Default true, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """A chat ends inside its last message. Default false."""
    add_special_tokens: bool | None = None
    """The tokenizer adds its own special tokens. Default true for `prompt`; for a chat its template writes them."""
    return_token_strs: bool | None = None
    """Adds `token_strs`, each token as the vocabulary spells it. Default false."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the chat template writes those of messages; leave it out")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    """The served model's name, as in /v1/models."""
    tokens: TokenList
    """Token ids."""


def read_tokenize(data: bytes, model: ServedModel) -> bytes:
    """The answer to a body of /tokenize; raises ApiError for text that no node can hold."""
    body = parse_body(TokenizeBody, data)
    model.check_name(body.model)
    builder = model.builder
    if body.messages is not None:
        names = (
            "messages",
            "tools",
            "chat_template",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        )
        ids = builder.chat_tokens(checked_body(ChatBody, {name: getattr(body, name) for name in names}))
    else:
        ids = builder.text_tokens(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    strings = [model.tokens.token_bytes.entry(token_id) for token_id in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": builder.limit, "tokens": list(ids), "token_strs": strings}
    return json.dumps(answer).encode()


def read_detokenize(data: bytes, model: ServedModel) -> bytes:
    """The answer to a body of /detokenize; raises ApiError for ids that the vocabulary lacks."""
    body = parse_body(DetokenizeBody, data)
    model.check_name(body.model)
    return json.dumps({"prompt": model.builder.token_text(body.tokens)}).encode()


def add_tokenizer_routes(app: FastAPI, answering: Answering) -> None:
    @app.post("/tokenize", **parsing_route(TokenizeBody, Tokenized))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a chat as the model's template renders it."""
        return Response(await answering.body(request, read_tokenize), media_type="application/json")

    @app.post("/detokenize", **parsing_route(DetokenizeBody, Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special tokens included."""
        return Response(await answering.body(request, read_detokenize), media_type="application/json")
