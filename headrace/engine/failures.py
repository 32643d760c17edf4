"""Ways in which an engine ends a request that it has taken, and what it says about them."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.intake import BadRequest
from headrace.engine.sequence import Sequence
from headrace.request import Request


class NeedsMoreMemory(BadRequest):
    """The device had no memory for a step with this prompt: it is refused, and the node goes on."""


class OutOfMemory(Exception):
    """The device had no memory for a step in which this request took part; another node may go on with it."""


class NanLogits(Exception):
    """The model's logits for this request's next token are NaN, and would be on any node. Other requests go on."""


class UnprovenPrefix(Exception):
    """This request's logits are NaN, perhaps because of a cached prefix that no token had been drawn from.

    That is forgotten: another attempt may succeed, here or elsewhere.
    """


class StepFailed(Exception):
    """The step that computed this request raised, and the node ends; the request may be the cause."""


def blamed(sequences: Iterable[Sequence]) -> Sequence:
    """The sequence to give up when a step finds too little memory.

    One that is scored before others, a prompt before answers that have begun, and of these the newest.
    """
    return max(sequences, key=lambda s: (bool(s.to_score), is_first_prefill(s), s.arrival))


def is_first_prefill(sequence: Sequence) -> bool:
    """True for a prompt of which nothing has been answered, here or on the node from which it was migrated."""
    return sequence.is_prefilling and not sequence.num_preemptions and not sequence.num_output


def first_line(error: BaseException) -> str:
    """The error's kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def log_summary(request: Request) -> str:
    """A request as a log may show it: its id and sizes, none of its text."""
    sampling = request.sampling
    flags = [f"max_tokens {sampling.max_tokens}"]
    flags += [f"logprobs {sampling.logprobs}"] * (sampling.logprobs is not None)
    flags += [f"prompt_logprobs {sampling.prompt_logprobs}"] * (sampling.prompt_logprobs is not None)
    return f"{request.request_id} ({len(request.tokens)} tokens, {', '.join(flags)})"
