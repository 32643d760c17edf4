"""What a client gets over HTTP from a prefill node and a decode node is what transformers generates alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.cluster.asking import Answered, ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.engine.oracle import clear_prompt, greedy, greedy_along, random_prompt

LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 500, 1500)
FAMILIES = (
    "falcon_h1", "granite", "granite_moe", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "nemotron_h_moe", "olmo_hybrid", "qwen35", "qwen35_moe",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tiny_checkpoint) -> Path:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(model, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def assert_greedy(model: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Answered]) -> None:
    assert {len(answer.tokens) for answer in answers} == {64}
    told = [greedy_along(model, prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    assert [answer.tokens for answer in answers] == told


async def test_greedy_alone_and_eight_at_once(cluster: Cluster, model: Path) -> None:
    prompts = [random_prompt(length) for length in LENGTHS]
    alone = await ask_all(cluster.url, prompts, at_once=1)
    assert_greedy(model, prompts, alone)
    assert {answer.report["path"] for answer in alone} == {"remote"}
    assert {answer.report["decode"]["state"] for answer in alone} == {"received"}
    # Other prompts of the same lengths, so that no cached prefix helps.
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    assert_greedy(model, prompts, await ask_all(cluster.url, prompts, at_once=8))


async def test_three_turns_of_a_chat_reuse_both_sides_and_change_no_token(cluster: Cluster, model: Path) -> None:
    prompt = random_prompt(200, seed=2)
    previous = 0
    for turn in range(3):
        (answer,) = await ask_all(cluster.url, [prompt], at_once=1)
        assert_greedy(model, [prompt], [answer])
        prefill, decode = answer.report["prefill"], answer.report["decode"]
        # The prefill node knows the previous prompt; the decode node its answer, too.
        assert prefill["state_hit_tokens"] == (previous - 1) // 16 * 16 if turn else prefill["state_hit_tokens"] == 0
        # What it fetches of that answer (if that is estimated to pay) it need not compute.
        reused = prefill["state_hit_tokens"] + prefill["fetched_tokens"]
        assert prefill["computed_tokens"] == len(prompt) - reused
        assert decode["attention_hit_tokens"] == ((previous + 63) // 16 * 16 if turn else 0)
        assert answer.report["transfer"]["attention_tokens"] == len(prompt) - decode["attention_hit_tokens"]
        assert answer.report["transfer"]["state_bytes"] > 0
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == reused
        previous = len(prompt)
        prompt = [*prompt, *answer.tokens, *random_prompt(23, seed=turn)]


async def test_the_same_prompt_again_moves_the_state_alone(cluster: Cluster, model: Path) -> None:
    """The answer is that of `generate` itself, all others are followed token by token."""
    prompt = clear_prompt(model, 96, 64, seed=3)
    first, again = await ask_all(cluster.url, [prompt, prompt], at_once=1)
    assert first.tokens == again.tokens == greedy(model, prompt, 64)
    assert again.report["decode"]["attention_hit_tokens"] == 96
    assert again.report["transfer"]["attention_bytes"] == 0
    assert again.report["prefill"]["computed_tokens"] == 16


async def test_a_single_node_answers_the_same(model: Path, tmp_path: Path) -> None:
    """Every length, but each with a third of the families: this path has no way of its own for any of them."""
    prompts = [random_prompt(length) for length in LENGTHS[FAMILIES.index(model.name) % 3 :: 3]]
    with Cluster(model, tmp_path, num_prefill=0) as single:
        answers = await ask_all(single.url, prompts, at_once=8)
        assert_greedy(model, prompts, answers)
        assert {answer.report["path"] for answer in answers} == {"local"}
        assert {answer.report["decode"]["state"] for answer in answers} == {"computed"}
        (again,) = await ask_all(single.url, [prompts[-1]], at_once=1)
        assert_greedy(model, prompts[-1:], [again])
        assert again.report["decode"]["state"] == "resumed"
