"""Streamed text beside the text that the tokenizer decodes at once, for tokenizers of every kind."""

from functools import cache
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.detokenizer import MAX_HELD, Detokenizer
from router.text.token_bytes import TokenBytes
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import VOCAB_SIZE
from tests.support.router.tokenizer_kinds import KINDS, TEXT

EXACT = [kind for kind in KINDS if kind != "byte_fallback"]
FIRST_BYTE_TOKEN = 3  # of the byte-fallback tokenizer
IDS = st.lists(st.integers(0, 360), max_size=40)

tokenizer_of = cache(lambda kind: KINDS[kind]())


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def text_of(kind: str, ids: list[int], prompt: list[int] | None = None) -> str:
    return "".join(pieces(tokenizer_of(kind), ids, prompt))


@given(text=st.text(max_size=60))
def test_pieces_join_to_the_text(text: str, tokens: ModelTokens):
    detokenizer = tokens.detokenizer()
    assert "".join([*map(detokenizer.push, tokens.encode(text)), detokenizer.finish()]) == text


@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=40))
def test_any_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int], tokens: ModelTokens):
    detokenizer = tokens.detokenizer()
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == tokens.decode(ids)


@pytest.mark.parametrize("kind", EXACT)
@given(ids=IDS)
def test_random_tokens_of_every_kind_decode_as_their_tokenizer_decodes_them(kind: str, ids: list[int]):
    assert text_of(kind, ids) == tokenizer_of(kind).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", EXACT)
@given(prompt=IDS, ids=IDS)
def test_an_answer_continues_its_prompt(kind: str, prompt: list[int], ids: list[int]):
    tokenizer = tokenizer_of(kind)
    before, both = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    if not before.endswith("\ufffd"):  # of a split character, the answer's half stands for itself
        assert before + text_of(kind, ids, prompt) == both


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", TEXT)
def test_every_cut_of_a_text_into_prompt_and_answer_gives_the_text(kind: str, line: str):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(line, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    assert whole.replace(" ", "") == line.replace(" ", "") or kind in ("word_piece", "no_decoder")
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        if not before.endswith("\ufffd"):
            assert before + text_of(kind, ids[cut:], ids[:cut]) == whole


@pytest.mark.parametrize(
    ("kind", "word", "start", "inside"),
    [
        ("byte_level", " the", " the", " the"),
        ("unigram", "code", "code", " code"),
        ("byte_fallback", "the", "the", " the"),
        ("word_piece", "the", "the", " the"),
        ("word_ends", "the", "the", " the"),
        ("no_decoder", "the", "the", " the"),
    ],
)
def test_a_space_is_dropped_at_a_texts_start_only(kind: str, word: str, start: str, inside: str):
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("June").ids, tokenizer.encode(word).ids
    assert text_of(kind, ids) == start
    assert text_of(kind, ids, prompt) == inside
    assert text_of(kind, ids, [*prompt, tokenizer.token_to_id("</s>")]) == inside


@given(text=st.text(max_size=12))
def test_byte_fallback_shows_a_character_with_its_last_byte(text: str):
    ids = [FIRST_BYTE_TOKEN + byte for byte in ("x" + text).encode()]
    shown = pieces(tokenizer_of("byte_fallback"), ids)
    assert "".join(shown) == "x" + text
    assert [piece for piece in shown if piece] == ["x", *text]


@given(ids=st.lists(st.integers(0, 300).filter(lambda i: i != FIRST_BYTE_TOKEN + ord(" ")), max_size=24))
def test_byte_fallback_shows_the_valid_beginning_of_each_run_of_bytes(ids: list[int]):
    """The tokenizer decodes such a run to U+FFFD alone, too late for characters that are already out."""
    tokenizer = tokenizer_of("byte_fallback")
    known = [
        i for i in ids if i == 0 or FIRST_BYTE_TOKEN <= i < tokenizer.get_vocab_size()
    ]  # neither special nor unknown
    expected = ""
    for is_byte, run in groupby(known, key=lambda i: FIRST_BYTE_TOKEN <= i < FIRST_BYTE_TOKEN + 256):
        if is_byte:
            data = bytes(i - FIRST_BYTE_TOKEN for i in run)
            valid = max(n for n in range(len(data) + 1) if _is_utf8(data[:n]))
            expected += data[:valid].decode() + "\ufffd" * (len(data) - valid)
        else:
            expected += "".join(tokenizer.id_to_token(i).replace("▁", " ") for i in run)
    assert text_of("byte_fallback", ids) == expected.removeprefix(" ")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.fixture(scope="module")
def token_of_byte() -> dict[int, int]:
    """The byte-level tokenizer's token for each byte alone."""
    tokenizer = tokenizer_of("byte_level")
    token_bytes = TokenBytes(tokenizer, ["ByteLevel"])
    written = {token_id: token_bytes.of(token_id) or b"" for token_id in range(tokenizer.get_vocab_size())}
    return {data[0]: token_id for token_id, data in written.items() if len(data) == 1}


def test_a_character_comes_when_it_is_complete(token_of_byte: dict[int, int]):
    ids = [token_of_byte[byte] for byte in "é世".encode()]
    assert pieces(tokenizer_of("byte_level"), ids) == ["", "é", "", "", "世", ""]


def test_an_unfinished_character_ends_as_a_replacement(token_of_byte: dict[int, int]):
    assert pieces(tokenizer_of("byte_level"), [token_of_byte[0xE4]]) == ["", "\ufffd"]


def test_an_answer_does_not_complete_the_prompts_character(token_of_byte: dict[int, int]):
    e4, b8, ad = (token_of_byte[byte] for byte in "中".encode())
    assert pieces(tokenizer_of("byte_level"), [ad, token_of_byte[ord("x")]], [e4, b8]) == ["", "\ufffdx", ""]


def test_special_tokens_and_unknown_ids_add_no_text():
    assert pieces(tokenizer_of("byte_level"), [0, 1, 100_000]) == ["", "", "", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_without_end_are_shown_in_parts(kind: str, token_of_byte: dict[int, int]):
    """Each step decodes what is held back: without a bound, n steps take n^2 time."""
    tokenizer = tokenizer_of(kind)
    invalid = FIRST_BYTE_TOKEN + 0xFF if kind == "byte_fallback" else token_of_byte[0xFF]
    shown = pieces(
        tokenizer, [*tokenizer.encode("The").ids, *[invalid] * (3 * MAX_HELD), *tokenizer.encode("June").ids]
    )
    assert max(map(len, shown)) <= MAX_HELD + len("June")
    assert "".join(shown).replace(" ", "") == "The" + "\ufffd" * (3 * MAX_HELD) + "June"
