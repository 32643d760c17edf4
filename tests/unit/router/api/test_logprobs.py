"""Log-probabilities as JSON: names of tokens whatever the tokenizer, values that are no numbers, and slices."""

import json
import math
from typing import Any

import pytest

from headrace.request import Alternative, Logprobs, Token
from router.api.logprobs import (
    SLICE_NUMBERS,
    chat_logprobs,
    columns_of,
    completion_logprobs,
    logprobs_json,
    num_logprobs,
    slices,
)
from router.errors import ApiError
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes
from tests.support.router.tokenizer_kinds import KINDS


@pytest.mark.parametrize(
    ("decoders", "name", "completion_name", "data"),
    [(["ByteFallback"], "\ufffd", "bytes:\\xe4", [0xE4]), ([], "<0xE4>", "<0xE4>", None)],
)
def test_bytes_are_null_where_the_decoder_does_not_determine_them(decoders, name, completion_name, data):
    tokenizer = KINDS["byte_fallback"]()
    names = TokenBytes(tokenizer, decoders)
    token = Token(tokenizer.token_to_id("<0xE4>"), Logprobs(-1.5, ()))
    (entry,) = chat_logprobs([token], names)["content"]
    assert (entry["token"], entry["bytes"]) == (name, data)
    assert completion_logprobs([token], [0], names)["tokens"] == [completion_name]


def scored(count: int, num_top: int, logprob: float = -1.5) -> list[Token]:
    top = tuple(Alternative(other, -1.0 - other) for other in range(num_top))
    return [Token(token_id % 200, Logprobs(logprob, top)) for token_id in range(count)]


def rendered(tokens: list[Token], names: TokenBytes, is_chat: bool) -> dict[str, Any]:
    return chat_logprobs(tokens, names) if is_chat else completion_logprobs(tokens, range(len(tokens)), names)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("first", [[], [Token(7)]], ids=["answer", "echo"])
def test_slices_join_to_the_json_of_the_whole(is_chat: bool, first: list[Token], tokens):
    all_tokens, names = [*first, *scored(700, 4)], tokens.token_bytes
    whole = TextDelta("text", tuple(all_tokens), tuple(range(len(all_tokens))))
    parts = list(slices(whole))
    assert [part.text for part in parts] == ["text"] + [""] * (len(parts) - 1)
    assert len(parts) > 5 and max(num_logprobs(part.tokens) for part in parts) <= SLICE_NUMBERS
    columns = []
    for part in parts:
        values = chat_logprobs(part.tokens, names) if is_chat else completion_logprobs(part.tokens, part.offsets, names)
        columns.append(columns_of(values))
    assert json.loads(logprobs_json(columns, is_chat=is_chat)) == rendered(all_tokens, names, is_chat)


def test_a_delta_without_logprobs_is_one_slice_and_renders_as_null():
    delta = TextDelta("text", (Token(1),) * 9999, (0,) * 9999)
    assert list(slices(delta)) == [delta] and list(slices(TextDelta(""))) == [TextDelta("")]
    assert logprobs_json([], is_chat=False) == "null"


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("place", ["chosen", "alternative"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_logprob_is_an_error_of_that_request(is_chat: bool, place: str, bad: float, tokens):
    logprobs = Logprobs(bad) if place == "chosen" else Logprobs(-1.0, (Alternative(3, bad),))
    with pytest.raises(ApiError, match="not numbers") as raised:
        rendered([Token(5, logprobs)], tokens.token_bytes, is_chat)
    assert (raised.value.status, raised.value.code) == (500, "invalid_logits")


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_minus_infinity_is_openais_stand_in(is_chat: bool, tokens):
    token = Token(5, Logprobs(-math.inf, (Alternative(3, -math.inf),)))
    text = json.dumps(rendered([token], tokens.token_bytes, is_chat), allow_nan=False)
    assert text.count("-9999.0") == (2 if is_chat else 3)  # a completion's token is among its own alternatives
