"""Offsets of an echoed prompt's tokens in the text."""

import json

from headrace.request import PromptLogprobs, Token
from router.api.body_schemas import parse_body
from router.api.choices import Choice
from router.api.completion_schemas import CompletionBody
from router.api.generation import RequestBuilder
from router.text.tokens import ModelTokens

PROMPT = "a 😀 b"


def test_offsets_count_a_character_that_is_split_over_tokens_once(tokens: ModelTokens):
    builder = RequestBuilder("little", tokens, lambda: 100)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    choice = Choice(0, builder.completion(parse_body(CompletionBody, json.dumps(body).encode())), tokens)
    ids = tokens.encode(PROMPT)
    written = [tokens.token_bytes.of(token_id) or b"" for token_id in ids]
    assert any(data and not data.decode(errors="ignore") for data in written), "a token that is no whole character"

    parts = [PromptLogprobs(1, (-1.0,) * 2), PromptLogprobs(3, (-1.0,) * (len(ids) - 3))]
    first, second = (delta for part in parts for delta in choice.prompt_deltas(choice.shown_prompt(part)))
    whole_before = [b"".join(written[:count]).decode(errors="ignore") for count in range(len(ids))]
    assert (first.text, second.text) == (PROMPT, "")
    assert [token.id for token in (*first.tokens, *second.tokens)] == ids
    assert (*first.offsets, *second.offsets) == tuple(map(len, whole_before))
    assert choice.text_delta([Token(tokens.encode("c")[0])]).offsets == (len(PROMPT),)
