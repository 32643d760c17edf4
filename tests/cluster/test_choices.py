"""Several choices of one prompt on real nodes: the prompt is computed once, and its blocks are shared."""

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S
from tests.support.cluster.cluster import Cluster
from tests.support.engine.oracle import greedy, random_prompt

pytestmark = pytest.mark.slow

NUM_CHOICES = 8
BLOCK = 16


def test_eight_choices_of_a_prompt_compute_it_once(tiny_checkpoint, tmp_path) -> None:
    model, prompt = tiny_checkpoint("qwen35"), random_prompt(512, seed=7)
    body = {
        "prompt": prompt,
        "n": NUM_CHOICES,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "headrace": {"report": True},
    }
    with Cluster(model, tmp_path, num_prefill=2, num_decode=2) as cluster:
        reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=ASK_TIMEOUT_S).json()
        expected = greedy(model, prompt, 4)
        assert [choice["token_ids"] for choice in reply["choices"]] == [expected] * NUM_CHOICES
        reports = reply["usage"]["headrace"]
        computed = [report["prefill"]["computed_tokens"] for report in reports]
        print(f"{sum(computed)} tokens computed for {NUM_CHOICES} choices of {len(prompt)} tokens: {computed}")
        assert computed[0] == len(prompt)
        assert all(count <= BLOCK for count in computed[1:]), "only the tokens after the last checkpoint"
        moved = [report["transfer"]["attention_tokens"] for report in reports]
        assert moved[0] == len(prompt)
        assert all(count <= BLOCK for count in moved[1:]), "the decode node has the blocks"
        assert len({report["decode"]["node"] for report in reports}) == 1
