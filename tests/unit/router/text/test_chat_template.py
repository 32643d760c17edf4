"""Chat templates in the place of the model's: the operator's, and those that come with requests."""

from pathlib import Path

import pytest

from router.errors import ApiError, ModelFolderError
from router.text.literal_tokens import NotLoaded
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import write_model_folder

CHAT = [{"role": "user", "content": "a question"}]
SECRET = "the code of June is 471"


@pytest.fixture(scope="module")
def trusting(model_folder: Path) -> ModelTokens:
    return ModelTokens(model_folder, trust_request_chat_template=True)


def rendered(tokens: ModelTokens, source: str) -> str:
    template = tokens.chat_template(source)
    return tokens.decode(tokens.render_chat(CHAT, template=template).tokens, skip_special_tokens=False)


def test_the_operators_template_takes_the_place_of_the_models(model_folder: Path, tmp_path: Path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% if tools %}{{ tools[0].name }} {% endif %}<tool_call> {{ messages[0].content }}")
    tokens = ModelTokens(model_folder, chat_template=file)
    prompt = tokens.render_chat(CHAT, tools=[{"name": "look"}])
    assert tokens.decode(prompt.tokens) == "look <tool_call> a question"
    assert tokens.formats.calls is not None
    file.write_text("{% if %}")
    with pytest.raises(ModelFolderError, match=r"mine\.jinja: the chat template does not compile: "):
        ModelTokens(model_folder, chat_template=file)


def test_a_request_brings_its_own_template_where_that_is_trusted(trusting: ModelTokens):
    assert rendered(trusting, "{{ messages[0].content | upper }}!") == "A QUESTION!"
    assert rendered(trusting, "{{ eos_token }}") == trusting.decode(
        [*trusting.encode("<|endoftext|>")], skip_special_tokens=False
    )


def test_a_requests_template_is_refused_elsewhere_with_the_remedy(tokens: ModelTokens):
    with pytest.raises(ApiError, match=r"trust_request_chat_template.*/v1/completions") as refused:
        tokens.chat_template("{{ messages }}")
    assert (refused.value.status, refused.value.param) == (400, "chat_template")


def test_a_requests_template_is_never_rendered_where_it_would_hold_others_up(model_folder: Path):
    on_the_loop = ModelTokens(model_folder, loads_literal=False, trust_request_chat_template=True)
    with pytest.raises(NotLoaded):
        on_the_loop.chat_template("a")


def test_a_model_without_a_template_takes_a_requests(tmp_path: Path):
    mute = ModelTokens(write_model_folder(tmp_path / "m", chat_template=None), trust_request_chat_template=True)
    assert rendered(mute, "{{ messages[0].content }}") == "a question"


@pytest.mark.parametrize(
    "template",
    [
        "{% include FILE %}",
        "{% extends FILE %}",
        "{% import FILE as f %}{{ f }}",
        "{{ strftime_now.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__']['open'](FILE).read() }}",
        "{{ raise_exception.__globals__.json.codecs.open(FILE).read() }}",
        "{{ lipsum.__globals__['os'].popen('cat ' ~ FILE).read() }}",
        "{{ cycler.__init__.__globals__.os.popen('cat ' ~ FILE).read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}' | format)(messages) }}",
        "{{ self._TemplateReference__context.environment.loader }}",
        "{{ (messages | map(attribute='__class__') | first).__base__ }}",
        "{{ messages.append(1) }}{{ messages[0].update(a=1) }}",
    ],
)
def test_a_requests_template_reads_no_file_and_changes_nothing(trusting: ModelTokens, tmp_path: Path, template: str):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    try:
        text = rendered(trusting, template.replace("FILE", f"'{file}'"))
    except ApiError as refused:
        assert refused.status == 400
        text = refused.message
    assert SECRET not in text and "<class" not in text and "<module" not in text
    assert CHAT == [{"role": "user", "content": "a question"}]


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('x' * 1000000) }}", "x{1000}$"),
        ("{% if %}", "does not compile"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "does not compile"),
        ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "does not compile"),
    ],
)
def test_a_template_that_fails_is_the_clients_error(trusting: ModelTokens, template: str, cause: str):
    with pytest.raises(ApiError, match=cause) as refused:
        rendered(trusting, template)
    assert refused.value.status == 400
    assert len(refused.value.message) < 1200
