from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.detokenizer import Detokenizer, bytes_of_token
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import VOCAB_SIZE

ANY_IDS = st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=40)


def incremental(tokens: ModelTokens, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokens.token_bytes)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(text=st.text(max_size=60))
def test_pieces_join_to_the_text(text: str, tokens: ModelTokens):
    assert "".join(incremental(tokens, tokens.encode(text))) == text


@given(ids=ANY_IDS)
def test_any_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int], model_folder: Path, tokens: ModelTokens):
    reference = Tokenizer.from_file(str(model_folder / "tokenizer.json")).decode(ids, skip_special_tokens=True)
    assert "".join(incremental(tokens, ids)) == reference
    assert tokens.token_bytes.decode(ids) == reference


def test_a_character_comes_when_it_is_complete(tokens: ModelTokens):
    vocabulary = {tokens.token_bytes.written(i): i for i in range(VOCAB_SIZE)}
    ids = [vocabulary[bytes([byte])] for byte in "é世".encode()]
    assert incremental(tokens, ids) == ["", "é", "", "", "世", ""]


def test_an_unfinished_character_ends_as_a_replacement(tokens: ModelTokens):
    vocabulary = {tokens.token_bytes.written(i): i for i in range(VOCAB_SIZE)}
    assert incremental(tokens, [vocabulary[b"\xe4"]]) == ["", "\ufffd"]


def test_special_tokens_and_unknown_ids_add_no_text(tokens: ModelTokens):
    assert incremental(tokens, [0, 1, 100_000]) == ["", "", "", ""]
    assert tokens.token_bytes.written(1) == b"<|im_start|>"


def test_bytes_of_added_tokens():
    assert bytes_of_token("two words") == b"two words"
    assert bytes_of_token("Ġa") == b" a"
