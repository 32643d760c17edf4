"""An engine around a model with its MTP layer: every state that it makes can be drafted from."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.engine.build import engine_around
from headrace.models.weights import load_model
from tests.support.engine.drafting import Newest, drafts
from tests.support.engine.driving import GREEDY, SMALL, request, run_all, submit
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import clear_prompt, greedy

ANSWER = replace(GREEDY, max_tokens=6)
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", ["qwen35", "qwen35_moe"])
def test_each_turn_of_a_chat_answers_and_drafts_as_its_oracles(family: str, load_family, tmp_path: Path):
    """The second turn hits on a checkpoint of the first; prompts come in chunks, answers run beside another prompt."""
    path = Path(shutil.copytree(load_family(family).path, tmp_path / family))
    oracle, model = add_mtp(path, seed=5), load_model(path, with_mtp=True)
    built = engine_around(model, replace(SMALL, max_step_tokens=48), time.monotonic)
    history: list[int] = []
    for turn in range(2):
        prompt = clear_prompt(path, 70, ANSWER.max_tokens, seed=turn, after=history)
        other = submit(built, request(clear_prompt(path, 90, ANSWER.max_tokens, seed=50 + turn), ANSWER))
        run = submit(built, request(prompt, ANSWER))
        run_all(built)
        assert run.tokens == greedy(path, prompt, ANSWER.max_tokens)
        assert bool(run.sequence.held.reused_tokens) == bool(history)
        for each in (run, other):
            tokens = [*each.sequence.job.request.tokens, *each.tokens]
            newest = Newest(tokens[-1], len(tokens) - 1, each.sequence.held.block_ids, each.sequence.state_slot)
            logits = drafts(model, built.memory, newest, num_drafts=1)
            torch.testing.assert_close(logits[0], oracle.draft_logits(tokens, 1), atol=TOLERANCE, rtol=0)
            built.engine.release(each.sequence)
        history = [*prompt, *run.tokens]
