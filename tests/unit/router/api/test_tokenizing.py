"""/tokenize and /detokenize beside what generation does with the same text."""

from importlib.metadata import version
from typing import Any

import pytest

from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    return await start_router(fake_cluster(tokens.encode("a")))


async def test_tokens_are_those_of_a_completions_prompt_and_give_its_text_back(running: Running, tokens: ModelTokens):
    reply = (await running.http.post("/tokenize", json={"prompt": "The code.", "return_token_strs": True})).json()
    assert reply["tokens"] == tokens.encode("The code.")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 2048)
    assert "".join(reply["token_strs"]).replace("Ġ", " ") == "The code."
    back = await running.http.post("/detokenize", json={"model": "little", "tokens": reply["tokens"]})
    assert back.json() == {"prompt": "The code."}


async def test_a_chats_tokens_are_those_that_it_is_charged_for(running: Running):
    count = (await running.http.post("/tokenize", json={"messages": CHAT})).json()
    chat = await running.http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
    assert count["token_strs"] is None
    assert count["count"] == chat.json()["usage"]["prompt_tokens"]
    text = (await running.http.post("/detokenize", json={"tokens": count["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_chat_may_end_anywhere(running: Running):
    async def text(**fields: Any) -> str:
        ids = (await running.http.post("/tokenize", json={"messages": CHAT} | fields)).json()["tokens"]
        prompt: str = (await running.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        return prompt

    assert await text(add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert await text(continue_final_message=True) == "<|im_start|>user\nhi"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "give either prompt or messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "é" * 3000}, "model's length of 2048"),
        ("/tokenize", {"prompt": "x " * 40_000}, "model's length of 2048"),
        ("/detokenize", {"tokens": [0] * 2049}, "2049 tokens"),
        ("/detokenize", {"tokens": [512]}, "token id 512 is outside the vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused(running: Running, path: str, body: dict[str, Any], message: str):
    reply = await running.http.post(path, json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_another_model_is_not_found(running: Running):
    for path, body in {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}.items():
        assert (await running.http.post(path, json=body | {"model": "other"})).status_code == 404


async def test_the_version_is_the_packages(running: Running):
    assert (await running.http.get("/version")).json() == {"version": version("headrace")}
