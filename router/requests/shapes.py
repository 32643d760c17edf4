"""A request and its client without their content: for logs, and for nodes."""

from __future__ import annotations

from dataclasses import asdict, fields
from hashlib import blake2b

from headrace.request import Request


def log_summary(request: Request) -> str:
    """Length and settings of a request without its content, so that an operator can send one like it."""
    settings = asdict(request.sampling)
    del settings["seed"]
    defaults = {field.name: field.default for field in fields(request.sampling)}
    flags = {name: value for name, value in settings.items() if value != defaults[name]}
    return f"{request.request_id}, {request.num_prompt_tokens} prompt tokens, {flags}"


def client_number(client: str) -> int:
    """64 bits of a hash of its name: nodes need to tell clients apart, not to know them."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest())
