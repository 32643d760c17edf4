"""Sizes that no kernel likes: vocabularies, heads and groups that are no multiples of anything."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.weights import load_model
from tests.support.engine.tiny_checkpoints import (
    build_model,
    kimi_linear_config,
    nemotron_h_config,
    nemotron_moe_fields,
    olmo_hybrid_config,
    pattern,
)

VOCABULARY = 509
ODD = {
    "nemotron, heads of 80, 7 groups": lambda: nemotron_h_config(
        layers_block_type=pattern("MM-*M"), intermediate_size=76, head_dim=80, mamba_num_heads=7, n_groups=7
    ),
    "nemotron, heads of 96, ends in experts": lambda: nemotron_h_config(
        layers_block_type=pattern("*MEME"), head_dim=96, **nemotron_moe_fields() | {"moe_latent_size": None}
    ),
    "kimi, heads of 80 and 96, values wider than keys": lambda: kimi_linear_config(
        qk_nope_head_dim=80, v_head_dim=96, linear_head_dim=40, num_experts=9, num_expert_group=3, topk_group=2
    ),
    "olmo, heads of 48": lambda: olmo_hybrid_config(
        hidden_size=144, num_attention_heads=3, num_key_value_heads=3, linear_key_head_dim=40, linear_value_head_dim=20
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_logits_of_a_prompt_and_of_single_tokens_are_those_of_transformers(name: str, tmp_path: Path, prompt):
    config: PreTrainedConfig = ODD[name]()
    config.vocab_size = VOCABULARY
    theirs, tokens = build_model(config), [token % VOCABULARY for token in prompt(150)]
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), position_ids=torch.arange(150)[None]).logits[0]
    model = load_model(tmp_path)
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), 10, 2))
    found = [runner.forward([SequenceInput(tokens[:147], 0, range(10), None, 0, num_logits=147)]).in_float32()]
    for position in (147, 148, 149):
        found.append(runner.forward([SequenceInput([tokens[position]], position, range(10), 0, 0)]).in_float32())
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)
