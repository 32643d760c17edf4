import json

import pytest
from tokenizers import Tokenizer

from router.text.token_bytes import TokenBytes, bytes_of_byte_level
from tests.support.router.tokenizer_kinds import KINDS


def bytes_of(kind: str) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = KINDS[kind]()
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    return tokenizer, TokenBytes(tokenizer, [part.get("type") for part in decoder.get("decoders", [decoder])])


@pytest.mark.parametrize(
    ("kind", "token", "data"),
    [
        ("byte_level", "Ġof", b" of"),
        ("byte_level", "Ã", b"\xc3"),
        ("byte_level", "</s>", b"</s>"),
        ("unigram", "▁c", b" c"),
        ("unigram", "▁", b" "),
        ("unigram", "</s>", b"</s>"),
        ("byte_fallback", "<0xE4>", b"\xe4"),
        ("byte_fallback", "<0x0A>", b"\n"),
        ("byte_fallback", "▁the", b" the"),
        ("byte_fallback", "</s>", b"</s>"),
        ("word_piece", "the", b" the"),
        ("word_piece", "##s", b"s"),
        ("no_decoder", "the", b" the"),
    ],
)
def test_a_tokens_bytes_are_those_inside_a_text(kind: str, token: str, data: bytes):
    tokenizer, token_bytes = bytes_of(kind)
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    assert token_bytes.of(token_id) == data
    assert token_bytes.entry(token_id) == token


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_only_pads_the_vocabulary_has_no_bytes(kind: str):
    _, token_bytes = bytes_of(kind)
    assert token_bytes.of(100_000) == b""
    assert token_bytes.entry(100_000) == ""


def test_bytes_that_a_decoder_does_not_determine_are_none():
    tokenizer, _ = bytes_of("byte_fallback")
    blind = TokenBytes(tokenizer, [])  # as for a decoder with byte tokens of another spelling
    assert blind.of(tokenizer.token_to_id("<0xE4>")) is None


def test_added_byte_level_tokens_are_their_own_utf8():
    assert bytes_of_byte_level("two words") == b"two words"
    assert bytes_of_byte_level("Ġa") == b" a"
