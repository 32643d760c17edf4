"""Through real nodes whose blocks differ in size, behind one router, no token changes."""

from pathlib import Path
from typing import Any

import pytest

from decode_node.config import LocalPrefillConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster, with_engine
from tests.support.engine.oracle import greedy_along, random_prompt

LENGTHS = (1, 15, 17, 31, 33, 64, 500, 1500)
ALWAYS = FetchConfig(min_tokens=1, max_time_ratio=1e9)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granite", "qwen35"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_answers_are_those_of_one_model(
    family: str, sizes: tuple[int, int], tiny_checkpoint, tmp_path: Path
) -> None:
    model = tiny_checkpoint(family)
    own, theirs = sizes
    settings: dict[str, Any] = {
        "prefill": {"engine": with_engine(block_size=own), "fetch_from_others": ALWAYS},
        "decode": {"engine": with_engine(block_size=theirs), "local_prefill": LocalPrefillConfig(max_tokens=0)},
    }
    prompts = [random_prompt(length) for length in LENGTHS]
    with Cluster(model, tmp_path, **settings) as cluster:
        known = [0 for _ in prompts]  # tokens of the turn before, that the decode node computed or was handed
        for _ in range(3):
            answers = await ask_all(cluster.url, prompts, at_once=4)
            for prompt, before, answer in zip(prompts, known, answers, strict=True):
                hit = before // theirs * theirs
                assert len(answer.tokens) == 64
                assert answer.tokens == greedy_along(model, prompt, answer.tokens)
                assert answer.report["decode"]["attention_hit_tokens"] == hit
                assert answer.report["transfer"]["attention_tokens"] == len(prompt) - hit
            known = [len(prompt) + 63 for prompt in prompts]
            prompts = [[*p, *a.tokens, *random_prompt(11, seed=len(p))] for p, a in zip(prompts, answers, strict=True)]
        # The router names decode nodes as fetch sources whatever their block size, by the prompt's keys of that size.
        assert any(answer.report["prefill"]["fetched_tokens"] for answer in answers)
