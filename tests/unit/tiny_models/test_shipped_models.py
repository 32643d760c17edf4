"""What is in the two model folders: size, tokenizer, chat template, and a short look at memory and calls."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.cluster.recall_documents import recall_documents
from tiny_models.chat import Message, render_chat
from tiny_models.evaluate import encoder, evaluate, evaluate_calls, load
from tiny_models.recall import held_out_questions
from tiny_models.tool_questions import held_out_tool_questions
from tiny_models.tools import FORMAT_OF_MODEL, chat_template

ROOT = Path(__file__).parents[3] / "tiny_models"
FOLDERS = (ROOT / "headrace-tiny-granite-h", ROOT / "headrace-tiny-qwen3.5")
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
CONVERSATION: list[Message] = [
    {"role": "system", "content": "The code of June is 471."},
    {"role": "user", "content": "What is the code of June?"},
    {"role": "assistant", "content": "The code of June is 471."},
    {"role": "user", "content": " \n<odd>  "},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(request.param)


def test_folders_are_complete_and_together_below_21_mb() -> None:
    for folder in FOLDERS:
        assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for folder in FOLDERS for path in folder.iterdir()) < 21e6


def test_both_models_share_one_tokenizer() -> None:
    first, second = ((folder / "tokenizer.json").read_bytes() for folder in FOLDERS)
    assert first == second


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(ids=st.lists(st.integers(0, 4095)))
def test_any_token_ids_decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("90210")] == list("90210")


def test_segments_of_a_document_encode_apart_as_they_do_together(tokenizer: PreTrainedTokenizerBase) -> None:
    encode = encoder(tokenizer)
    for document in itertools.islice(recall_documents(0, 10), 50):
        apart = [token for segment in document for token in encode(segment.text)]
        assert apart == encode("".join(segment.text for segment in document))


def test_every_history_is_a_prefix_of_the_next(tokenizer: PreTrainedTokenizerBase) -> None:
    for length in range(1, len(CONVERSATION)):
        shorter, longer = (
            tokenizer.apply_chat_template(CONVERSATION[:n], tokenize=True, return_dict=False)
            for n in (length, length + 1)
        )
        assert longer[: len(shorter)] == shorter


def test_the_assistants_turn_is_generation_prompt_text_and_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True)
    history = tokenizer.apply_chat_template(CONVERSATION[:3], tokenize=False)
    assert history == prompt + CONVERSATION[2]["content"] + tokenizer.eos_token


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_template_renders_as_the_python_form(tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert rendered == render_chat(CONVERSATION, add_generation_prompt=add_generation_prompt)


def test_an_unknown_role_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_template_is_that_of_the_familys_calls(folder: Path) -> None:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    assert (folder / "chat_template.jinja").read_text() == chat_template(FORMAT_OF_MODEL[model_type])


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_held_out_calls_are_made(folder: Path) -> None:
    """18 of 20, as the 180 of 200 that the folder's README has a table of."""
    torch.manual_seed(0)
    outcomes = evaluate_calls(*load(folder), held_out_tool_questions(20, seed=5))
    assert sum(right for _, _, right in outcomes) >= 18


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_held_out_codes_are_recalled(folder: Path) -> None:
    """Far from chance (1 in 900): 18 of 20, raw and chat."""
    torch.manual_seed(0)
    model, tokenizer = load(folder)
    outcomes = evaluate(model, tokenizer, held_out_questions(10, seed=5, encode=encoder(tokenizer)))
    assert sum(outcome.right for outcome in outcomes) >= 18
