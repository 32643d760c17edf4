"""What a choice's text keeps of its end: stop strings, stop tokens, special tokens."""

import pytest

from headrace.request import Sampling, Token
from router.text.text_stream import TextStream
from router.text.tokens import ModelTokens

TEXT = "a code, and more"


def stream(tokens: ModelTokens, *, stops=(), stop_ids=(), include: bool = False, skip: bool = True) -> TextStream:
    sampling = Sampling(max_tokens=99, seed=0, stop_token_ids=tuple(stop_ids))
    detokenizer = tokens.detokenizer(skip_special_tokens=skip)
    return TextStream(detokenizer, sampling, stops, tokens.eos_ids, include_stop=include)


def text_of(stream: TextStream, ids: list[int]) -> str:
    return stream.push([Token(token_id) for token_id in ids]).text + stream.finish()


@pytest.mark.parametrize(("include", "shown"), [(False, "a code"), (True, "a code, ")])
def test_a_stop_string_ends_the_text_or_is_left_out(tokens: ModelTokens, include: bool, shown: str):
    made = stream(tokens, stops=[", "], include=include)
    assert text_of(made, tokens.encode(TEXT)) == shown
    assert made.stop_found == ", "


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_named_and_its_text_left_out_unless_wanted(tokens: ModelTokens, include: bool):
    ids = tokens.encode("a code")
    made = stream(tokens, stop_ids=ids[-1:], include=include)
    assert text_of(made, ids) == tokens.decode(ids if include else ids[:-1])
    assert made.stop_token == ids[-1]


def test_the_models_own_end_is_no_stop_token_of_the_client(tokens: ModelTokens):
    eos = min(tokens.eos_ids)
    made = stream(tokens)
    text_of(made, [*tokens.encode("a"), eos])
    assert made.stop_token is None


def test_special_tokens_are_shown_if_wanted(tokens: ModelTokens):
    special = next(i for i in range(tokens.vocab_size) if tokens.decode([i]) == "" != tokens.token_bytes.entry(i))
    ids = [*tokens.encode("a"), special, *tokens.encode("b")]
    assert text_of(stream(tokens, stop_ids=[], skip=True), [i for i in ids if i not in tokens.eos_ids]) in ("ab", "a b")
    sampling = Sampling(max_tokens=99, seed=0, ignore_eos=True)
    shown = TextStream(tokens.detokenizer(skip_special_tokens=False), sampling, (), tokens.eos_ids)
    assert text_of(shown, ids) == tokens.decode(ids, skip_special_tokens=False)
