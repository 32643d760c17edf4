"""The sampling of a generation request: a body's fields over the model's defaults, checked against each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headrace.request import BadWord, Sampling
from router.api.request_schemas import GenerationBody
from router.errors import bad_request
from router.text.tokens import ModelTokens

MAX_BAD_WORD_TOKENS = 64


def sampling_of(
    body: GenerationBody,
    tokens: ModelTokens,
    max_tokens: int,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    """The sampling that a body asks for, with seed 0; raises ApiError (400) for what cannot be held."""
    defaults = tokens.sampling_defaults
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    check_ids(body.stop_token_ids or (), tokens.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), tokens.vocab_size, "allowed_token_ids")
    check_ids(body.biases, tokens.vocab_size, "logit_bias")
    stop_ids = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else tokens.eos_ids)
    words = tuple(_bad_words(body.bad_words or (), tokens))
    if body.allowed_token_ids is not None:
        lost = {word.tokens[-1] for word in words} | (stop_ids if min_tokens else set())
        if lost.issuperset(body.allowed_token_ids):
            raise bad_request(
                "allowed_token_ids: bad_words and min_tokens leave none of these; allow more", "allowed_token_ids"
            )
    return Sampling(
        max_tokens=max_tokens,
        seed=0,  # set for all requests in a row
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(defaults.top_k if body.top_k is None else body.top_k, 0),  # -1 is vLLM's "no limit"
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        bias_ids=tuple(body.biases),
        bias_values=tuple(body.biases.values()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=words,
    )


def check_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises ApiError (400) for a token id outside the vocabulary."""
    known = range(vocab_size)
    if not ids or (min(ids) in known and max(ids) in known):
        return
    token_id = next(each for each in ids if each not in known)
    raise bad_request(f"{field}: token id {token_id} is outside the vocabulary; use 0 to {known[-1]}", field)


def _bad_words(words: Sequence[str], tokens: ModelTokens) -> Iterator[BadWord]:
    """Token sequences of each word, at the beginning of a text and after a space, where that is one token as well.

    Source: vLLM's `SamplingParams.update_from_tokenizer`.
    """
    for word in words:
        first = tokens.encode(word.lstrip() or word, add_special_tokens=False)
        if not 0 < len(first) <= MAX_BAD_WORD_TOKENS:
            raise bad_request(
                f"bad_words {word!r:.60}: has {len(first)} tokens; use 1 to {MAX_BAD_WORD_TOKENS}", "bad_words"
            )
        yield BadWord(tuple(first))
        after_space = tokens.encode(f" {word.lstrip()}", add_special_tokens=False)
        if len(after_space) == len(first) and after_space[0] != first[0]:
            yield BadWord(tuple(after_space))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
