"""Readers of chats' and completions' bodies."""

from __future__ import annotations

from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.generation import GenerationRequest
from router.parsing.body_parser import ServedModel


def read_chat(data: bytes, model: ServedModel) -> GenerationRequest:
    """The generation request of a chat's body; raises ApiError for a body that cannot be served."""
    body = parse_body(ChatBody, data)
    model.check_name(body.model)
    return model.builder.chat(body)


def read_completion(data: bytes, model: ServedModel) -> GenerationRequest:
    """The generation request of a completion's body; raises ApiError for a body that cannot be served."""
    body = parse_body(CompletionBody, data)
    model.check_name(body.model)
    return model.builder.completion(body)
