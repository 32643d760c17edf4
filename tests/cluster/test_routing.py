"""Two prefill and two decode nodes under the policy `predicted`: prompts go where what they need is cached."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_runtime.config import FetchConfig
from tests.support.cluster.asking import Answered, ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import until_the_router_knows

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[2] / "tiny_models"
ALWAYS = {"fetch_from_others": FetchConfig(min_tokens=1, max_time_ratio=1e9)}
NUM_CHATS, TURNS, FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 3, 5, 1000, 40, 24
SYSTEM_TOKENS, SHARING_CHATS = 480, 16


@pytest.fixture(scope="module", params=["fixed", "elastic"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests: no prompt of one begins like a prompt of another."""
    folder = tmp_path_factory.mktemp("cluster")
    router = {"policy": "predicted", "roles": request.param}
    model = MODELS / "headrace-tiny-granite-h"
    with Cluster(model, folder, num_prefill=2, num_decode=2, prefill=ALWAYS, decode=ALWAYS, router=router) as running:
        yield running


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 500) for _ in range(count)]


async def test_no_turn_of_a_chat_computes_the_turns_before_it_again(cluster: Cluster) -> None:
    rng = random.Random(1)
    prompts = [tokens(rng, FIRST_TOKENS) for _ in range(NUM_CHATS)]
    for turn in range(TURNS):
        answers: list[Answered] = []
        for prompt in prompts:
            answers += await ask_all(cluster.url, [prompt], at_once=1, num_tokens=ANSWER_TOKENS)
        if turn:
            last_prompt = (len(prompts[0]) - NEW_TOKENS - ANSWER_TOKENS - 1) // 16 * 16
            cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert min(cached) >= last_prompt
        prompts = [
            [*prompt, *answer.tokens, *tokens(rng, NEW_TOKENS)] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await until_the_router_knows(cluster)


async def test_a_shared_system_prompt_is_computed_once_and_serves_chats_on_several_nodes(cluster: Cluster) -> None:
    rng = random.Random(2)
    system = tokens(rng, SYSTEM_TOKENS)
    prompts = [system + tokens(rng, 20) for _ in range(SHARING_CHATS)]
    hints = {"headrace": {"report": True, "checkpoint_at": [SYSTEM_TOKENS]}}
    answers = await ask_all(cluster.url, prompts[:1], at_once=1, num_tokens=ANSWER_TOKENS, **hints)
    await until_the_router_knows(cluster)
    answers += await ask_all(cluster.url, prompts[1:], at_once=SHARING_CHATS, num_tokens=ANSWER_TOKENS, **hints)
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0] + [SYSTEM_TOKENS] * (SHARING_CHATS - 1)
    nodes = Counter(answer.report["routing"]["plan"]["prefill"] for answer in answers)
    print(f"computed by {cached.count(0)} of {SHARING_CHATS} chats; prompts by node: {dict(nodes)}")
    assert len(nodes) > 1


async def test_chats_that_arrive_at_one_moment_compute_their_system_prompt_about_once_a_node(cluster: Cluster) -> None:
    """Nobody has seen it before: the first on each node computes it, and the others wait for that."""
    rng = random.Random(3)
    system = tokens(rng, SYSTEM_TOKENS)
    prompts = [system + tokens(rng, 20) for _ in range(SHARING_CHATS)]
    hints = {"headrace": {"report": True, "checkpoint_at": [SYSTEM_TOKENS]}}
    answers = await ask_all(cluster.url, prompts, at_once=SHARING_CHATS, num_tokens=ANSWER_TOKENS, **hints)
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert set(cached) <= {0, SYSTEM_TOKENS}
    print(f"computed by {cached.count(0)} of {SHARING_CHATS} chats that came at once")
    assert cached.count(0) <= len(cluster.processes) - 1, "one for each node, the router aside"
