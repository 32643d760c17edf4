from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from headrace.token_array import TokenArray
from router.errors import ApiError, ModelFolderError
from router.text.message_ends import MAX_ENDS
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import CHAT_TEMPLATE, END_ID, START_ID, STOP_ID, write_model_folder
from tests.support.router.template_counter import count_renderings
from tests.support.router.tokenizer_kinds import KINDS

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the code of June?"},
    {"role": "assistant", "content": "471."},
    {"role": "user", "content": "And of May?"},
]


def ends_of(tokens: ModelTokens, chat: Sequence[Mapping[str, str]]) -> list[TokenArray]:
    """The prompt's tokens up to the end of each message, as the test template writes messages."""
    texts = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat]
    encoded = [tokens.encode("".join(texts[:count]), add_special_tokens=False) for count in range(1, len(chat) + 1)]
    return [TokenArray.of(ids) for ids in encoded]


def test_limits_come_from_the_nested_config_and_eos_from_the_generation_config(tokens: ModelTokens):
    assert tokens.max_model_tokens == 2048
    assert tokens.vocab_size == 512
    assert tokens.eos_ids == {END_ID, STOP_ID}


def test_chat_renders_special_tokens_and_the_assistants_turn(tokens: ModelTokens):
    prompt = tokens.render_chat(CHAT)
    assert prompt.tokens.count(START_ID) == 5
    text = b"".join(tokens.token_bytes.of(i) or b"" for i in prompt.tokens).decode()
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_boundaries_are_the_ends_of_messages(tokens: ModelTokens):
    prompt = tokens.render_chat(CHAT)
    assert [prompt.tokens[:end] for end in prompt.boundaries()] == ends_of(tokens, CHAT)


def test_of_many_messages_the_first_and_the_last_ends_are_boundaries(
    tokens: ModelTokens, monkeypatch: pytest.MonkeyPatch
):
    chat = CHAT + [{"role": "user", "content": f"And of {year}?"} for year in range(1900, 2000)]
    ends = ends_of(tokens, chat)
    renderings = count_renderings(monkeypatch)
    prompt = tokens.render_chat(chat)
    assert [prompt.tokens[:end] for end in prompt.boundaries()] == ends[:MAX_ENDS] + ends[-MAX_ENDS:]
    assert len(renderings) == 1 + 1 + 3  # the chat, with marks, and one shorter chat for each role


def test_each_turn_extends_the_last_one(tokens: ModelTokens):
    first, second = tokens.render_chat(CHAT[:2]), tokens.render_chat(CHAT)
    shared = first.boundaries()[-1]
    assert second.tokens[:shared] == first.tokens[:shared]
    assert shared in second.boundaries()


def test_system_boundary_with_a_template_that_wants_a_question(tmp_path: Path):
    template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no question') }}{% endif %}" + CHAT_TEMPLATE
    )
    strict = ModelTokens(write_model_folder(tmp_path / "strict", chat_template=template))
    prompt = strict.render_chat(CHAT)
    system = strict.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", add_special_tokens=False)
    assert prompt.boundaries()[0] == len(system)


def test_a_template_may_rewrite_history(tmp_path: Path):
    template = "{{ messages | length }}" + CHAT_TEMPLATE  # no shorter chat is a prefix
    changing = ModelTokens(write_model_folder(tmp_path / "changing", chat_template=template))
    assert len(changing.render_chat(CHAT).boundaries()) == 1


def test_templates_have_the_helpers_of_transformers(tmp_path: Path):
    template = (
        "{%- for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ bos_token }}{{ {'a': '<&é'} | tojson }}{{ strftime_now('%Y') | length }}{{ eos_token }}\n{%- endfor %}"
    )
    helped = ModelTokens(write_model_folder(tmp_path / "helped", chat_template=template))
    text = b"".join(helped.token_bytes.of(i) or b"" for i in helped.render_chat(CHAT).tokens).decode()
    assert text == '<|endoftext|>{"a": "<&é"}4<|endoftext|>'


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path):
    template = "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}"
    evil = ModelTokens(write_model_folder(tmp_path / "evil", chat_template=template))
    with pytest.raises(ApiError):
        evil.render_chat(CHAT)


def test_chat_template_file_wins(tmp_path: Path):
    folder = write_model_folder(tmp_path / "file")
    (folder / "chat_template.jinja").write_text("hello")
    assert ModelTokens(folder).render_chat(CHAT).tokens == TokenArray.of(ModelTokens(folder).encode("hello"))


def test_a_refused_chat_names_its_cause(tokens: ModelTokens, tmp_path: Path):
    with pytest.raises(ApiError, match="unknown role wizard"):
        tokens.render_chat([{"role": "wizard", "content": "x"}])
    with pytest.raises(ApiError, match="knows no tools"):
        tokens.render_chat(CHAT, tools=[{"type": "function"}])
    mute = ModelTokens(write_model_folder(tmp_path / "mute", chat_template=None))
    with pytest.raises(ApiError, match="no chat template; use /v1/completions"):
        mute.render_chat(CHAT)


def test_a_text_that_is_far_too_long_is_counted_no_further_than_certain(
    tokens: ModelTokens, monkeypatch: pytest.MonkeyPatch
):
    encoded: list[int] = []
    encode = ModelTokens.encode

    def counting(self: ModelTokens, text: str, **options: bool) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(ModelTokens, "encode", counting)
    assert (tokens.exceeds("0123456789" * 800_000, 100_000) or 0) > 100_000
    assert sum(encoded) < 300_000


@pytest.mark.parametrize("text", ["the code of June is 471. ", "0123456789", " ", "aaaaaaab", "\n\n \t", "世界"])
def test_what_is_said_about_a_long_text_is_true(tokens: ModelTokens, text: str):
    long = text * (300_000 // len(text))
    count = len(tokens.encode(long))
    for limit in (count // 8, count // 2, count - 1):
        assert (tokens.exceeds(long, limit) or 0) <= count
    assert tokens.exceeds(long, count) is None


def test_lone_surrogates_are_refused(tokens: ModelTokens):
    with pytest.raises(ApiError, match="not valid Unicode"):
        tokens.encode("a\ud800")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    folder = write_model_folder(tmp_path / "broken")
    (folder / "tokenizer.json").write_text('{"model": {"type": "Abacus"}}')
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: no tokenizer that the tokenizers library can read"):
        ModelTokens(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: missing"):
        ModelTokens(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_the_ends_of_messages_for_a_tokenizer_of_any_kind(kind: str, tmp_path: Path):
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} </s>{% endfor %}"
    folder = write_model_folder(tmp_path / kind, chat_template=template)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    tokens = ModelTokens(folder)
    chat = [{"role": "user", "content": "the code"}, {"role": "assistant", "content": "of June"}]
    prompt = tokens.render_chat(chat)
    ends = [
        position for position, token_id in enumerate(prompt.tokens, 1) if tokens.token_bytes.entry(token_id) == "</s>"
    ]
    assert len(ends) == 2
    assert prompt.boundaries() == tuple(ends)
