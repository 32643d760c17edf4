"""Names of tokens in logprobs, whatever the tokenizer."""

import pytest

from headrace.request import Logprobs, Token
from router.api.logprobs import chat_logprobs, completion_logprobs
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
