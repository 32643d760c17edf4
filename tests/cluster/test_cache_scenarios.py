"""Scenarios of a hybrid prefix cache through HTTP: the shipped model, a prefill node and a decode node.

What counts is `usage.prompt_tokens_details.cached_tokens`: prompt tokens that no node had to compute.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from decode_node.config import LocalPrefillConfig
from tests.support.cluster.asking import ASK_TIMEOUT_S, Answered, ask
from tests.support.cluster.cluster import ALWAYS_REMOTE, Cluster, with_engine
from tests.support.engine.oracle import random_prompt

MODEL = Path(__file__).parents[2] / "tiny_models" / "headrace-tiny-qwen3.5"
BLOCK = 16
VOCABULARY = 4096

pytestmark = pytest.mark.slow


def client(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S)


def cached_tokens(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


async def chat(http: httpx.AsyncClient, messages: list[dict[str, str]], **own: Any) -> tuple[str, dict[str, Any]]:
    """The answer, and the usage with its report."""
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "headrace": {"report": True, **own}}
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return content["choices"][0]["message"]["content"], content["usage"]


# ---------------------------------------------------------------- scenario 4


@pytest.mark.parametrize(
    ("policy", "hints", "shares"),
    [("align", [], (0.0, 0.949)), ("every", [], (0.356, 0.949)), ("branch", [1632], (0.356, 0.949))],
)
async def test_4_a_prompt_that_shares_a_third_and_that_prompt_again(
    policy: str, hints: list[int], shares: tuple[float, float], tmp_path: Path
) -> None:
    """4,584 tokens in one chunk; then as many that share the first 1,632; then these again."""
    first = random_prompt(4584, vocab_size=VOCABULARY)
    second = [*first[:1632], *random_prompt(4584 - 1632, seed=1, vocab_size=VOCABULARY)]
    engine = with_engine(
        checkpoint_policy=policy, max_step_tokens=8192, cache_bytes=192 << 20, state_share=0.8, dtype="float32"
    )
    options = {"report": True, "checkpoint_at": hints}
    with Cluster(MODEL, tmp_path, engine=engine) as cluster:
        async with client(cluster) as http:
            answers = [await ask(http, prompt, num_tokens=2, headrace=options) for prompt in (first, second, second)]
    found = [cached_tokens(answer.usage) / 4584 for answer in answers]
    assert found[0] == 0
    for share, expected in zip(found[1:], shares, strict=True):
        assert share >= expected
    if policy == "align":
        assert found[1] == 0
    # A share is blocks that exist: the second prompt's attention hit is the same under each policy.
    assert [answer.report["prefill"]["attention_hit_tokens"] for answer in answers] == [0, 1632, 4576]


# ---------------------------------------------------------------- scenario 17


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Everything by default: a decode node that has nearly the whole prompt resumes by itself."""
    decode = {"local_prefill": LocalPrefillConfig()}
    with Cluster(MODEL, tmp_path_factory.mktemp("cluster"), decode=decode) as running:
        yield running


QUESTIONS = ("What is the code of June?", "And of Mia?", "Tell me a story about Mia.", "Who is June?", "Tell me more.")


async def talk(cluster: Cluster) -> list[dict[str, Any]]:
    """The usage of each of five turns of one chat."""
    messages = [{"role": "system", "content": "The code of June is 471. The code of Mia is 208. " * 4}]
    usages = []
    async with client(cluster) as http:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer, usage = await chat(http, messages)
            messages.append({"role": "assistant", "content": answer})
            usages.append(usage)
    return usages


def whole_turns(usages: list[dict[str, Any]]) -> list[int]:
    """Prompt and answer of each turn that another one followed."""
    return [usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages[:-1]]


async def test_17_each_turn_of_a_chat_finds_the_whole_turn_before(cluster: Cluster) -> None:
    usages = await talk(cluster)
    assert usages[0]["headrace"]["path"] == "remote"
    for usage, before in zip(usages[1:], whole_turns(usages), strict=True):
        report = usage["headrace"]
        assert (report["path"], report["decode"]["state"]) == ("local", "resumed")
        assert cached_tokens(usage) >= before - BLOCK


async def test_17_without_local_prefill_no_block_of_the_turn_before_moves(tmp_path: Path) -> None:
    with Cluster(MODEL, tmp_path, decode={"local_prefill": ALWAYS_REMOTE}) as remote:
        usages = await talk(remote)
    for turn, (usage, before) in enumerate(zip(usages[1:], whole_turns(usages), strict=True)):
        report = usage["headrace"]
        assert (report["path"], report["decode"]["state"]) == ("remote", "received")
        hit = report["decode"]["attention_hit_tokens"]
        assert hit >= before - BLOCK
        assert report["transfer"]["attention_tokens"] == usage["prompt_tokens"] - hit
        assert report["transfer"]["state_bytes"] > 0
        # The prefill node resumes at the end of the prompt before, or further on if it fetched the answer.
        prompt_before = usages[turn]["prompt_tokens"]
        assert cached_tokens(usage) >= (prompt_before - 1) // BLOCK * BLOCK
        assert cached_tokens(usage) == usage["prompt_tokens"] - report["prefill"]["computed_tokens"]


# ---------------------------------------------------------------- boundaries and tenants


async def test_the_second_chat_under_a_system_prompt_finds_it(cluster: Cluster) -> None:
    """Not only the third: the router tells the nodes where the system prompt ends."""
    system = "The code of the harbour is 335. Ben lives near the mill. " * 12
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    num_shared = len(tokenizer.encode(f"<|system|>{system}<|end|><|user|>", add_special_tokens=False).ids)
    usages = []
    async with client(cluster) as http:
        for question in ("Where does Ben live? " * 8, "What is the code of the harbour? " * 8):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            usages.append((await chat(http, messages))[1])
    # The questions are longer than a block: no end of a prompt happens to be where the system prompt ends.
    assert all(usage["prompt_tokens"] > num_shared + 2 * BLOCK for usage in usages)
    assert cached_tokens(usages[0]) == 0
    assert cached_tokens(usages[1]) == usages[1]["headrace"]["prefill"]["state_hit_tokens"]
    assert cached_tokens(usages[1]) == (num_shared - 1) // BLOCK * BLOCK > 190


async def test_18_two_tenants_share_nothing(cluster: Cluster) -> None:
    prompt = random_prompt(200, seed=7, vocab_size=VOCABULARY)

    async def of(http: httpx.AsyncClient, tenant: str) -> Answered:
        return await ask(http, prompt, num_tokens=4, headrace={"report": True, "salt": tenant})

    async with client(cluster) as http:
        first, other, again = [await of(http, tenant) for tenant in ("one", "two", "one")]
    for answer in (first, other):
        assert cached_tokens(answer.usage) == 0
        assert answer.report["prefill"]["attention_hit_tokens"] == answer.report["decode"]["attention_hit_tokens"] == 0
    assert cached_tokens(again.usage) == 192
    assert first.tokens == other.tokens == again.tokens
