"""Requests whose logits are NaN: each ends, and costs no node and no other request anything."""

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.cluster.asking import ASK_TIMEOUT_S, ask_all
from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.engine.checkpoint_edits import edit_config, edit_tensors
from tests.support.engine.oracle import greedy, random_prompt

PROMPT = random_prompt(60, seed=1)


def without_a_vector(path: Path, token: int, folder: Path) -> Path:
    """The checkpoint with NaN in place of a token's embedding, and the head as it was."""

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embedding = tensors["model.embed_tokens.weight"]
        tensors = {"lm_head.weight": embedding.clone(), **tensors}
        tensors["model.embed_tokens.weight"] = embedding.index_fill(0, torch.tensor([token]), torch.nan)
        return tensors

    broken = Path(shutil.copytree(path, folder / "broken"))
    edit_config(broken, tie_word_embeddings=False)
    edit_tensors(broken, edit)
    return broken


def counted(cluster: Cluster) -> list[int]:
    nodes = cluster.nodes()
    return [nodes[name]["counters"]["nan_requests"] for name in ("p0", "d0")]


@pytest.mark.parametrize("on", ["the prefill node", "the decode node"])
def test_a_request_without_a_next_token_ends_and_nothing_else_does(on: str, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("granite")
    answer = greedy(model, PROMPT, 64)
    token = next(token for token in range(5, 512) if token not in [*PROMPT, *answer])
    with Cluster(without_a_vector(model, token, tmp_path), tmp_path) as cluster:
        # Drawn as the first token it is given to the decode node, which finds no second one.
        ends = {"prompt": [*PROMPT[:30], token]} if on == "the prefill node" else {"logit_bias": {str(token): 100}}
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **ends}
        with httpx.Client(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
            for _ in range(2):
                reply = client.post("/v1/completions", json=body)
                assert (reply.status_code, reply.json()["error"]["code"]) == (500, "invalid_logits"), reply.text
                assert "logits behind" in reply.json()["error"]["message"]
            (beside,) = asyncio.run(ask_all(cluster.url, [PROMPT], at_once=1))
            cluster.idle_nodes(["p0", "d0"])
            assert beside.tokens == answer
            expected = [2, 0] if on == "the prefill node" else [0, 2]
            wait_until(lambda: counted(cluster) == expected, f"the nodes count {expected}")
