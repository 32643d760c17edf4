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
from tests.support.engine.driving import GREEDY, SMALL, request, submit
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import clear_prompt, greedy

MOST_TOKENS = 12
ANSWER = replace(GREEDY, max_tokens=2 * MOST_TOKENS)
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", ["qwen35", "qwen35_moe"])
def test_each_turn_of_a_chat_answers_and_drafts_as_its_oracles(family: str, load_family, tmp_path: Path):
    """The second turn hits on a checkpoint of the first; prompts come in chunks, answers run beside another prompt.

    Drafts begin behind the state that a halt writes.
    """
    path = Path(shutil.copytree(load_family(family).path, tmp_path / family))
    oracle, model = add_mtp(path, seed=5), load_model(path, with_mtp=True)
    built = engine_around(model, replace(SMALL, max_step_tokens=48), time.monotonic)
    history: list[int] = []
    for turn in range(2):
        prompt = clear_prompt(path, 70, MOST_TOKENS, seed=turn, after=history)
        other = submit(built, request(clear_prompt(path, 90, MOST_TOKENS, seed=50 + turn), ANSWER))
        run = submit(built, request(prompt, ANSWER))
        while min(len(run.tokens), len(other.tokens)) < 6:
            built.engine.admit()
            built.engine.step()
        assert bool(run.sequence.held.reused_tokens) == bool(history)
        for each in (run, other):
            built.engine.halt(each.sequence)
            asked = [*each.sequence.job.request.tokens]
            assert each.tokens == greedy(path, asked, len(each.tokens)) and len(each.tokens) <= MOST_TOKENS
            tokens = [*asked, *each.tokens]
            newest = Newest(tokens[-1], len(tokens) - 1, each.sequence.held.block_ids, each.sequence.state_slot)
            logits = drafts(model, built.memory, newest, num_drafts=1)
            torch.testing.assert_close(logits[0], oracle.draft_logits(tokens, 1), atol=TOLERANCE, rtol=0)
            built.engine.release(each.sequence)
        history = [*prompt, *run.tokens]
