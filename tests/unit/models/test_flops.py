"""Weights that a token is multiplied by, against the matrices that transformers makes for the same config."""

import pytest
import torch

from headrace.models.flops import num_weights, num_weights_met


@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "nemotron_h_moe", "olmo_hybrid", "kimi_linear"])
def test_a_token_meets_every_matrix_once_and_of_the_experts_its_own(name: str, load_family):
    family = load_family(name)
    config = family.model.config
    share = 1.0 if config.moe is None else config.moe.experts_per_token / config.moe.num_experts
    expected = 0.0
    for tensor, weight in family.oracle.named_parameters():
        if "embed" in tensor or "conv1d" in tensor or "A_log" in tensor or weight.dim() < 2:
            continue
        expected += weight.numel() * (share if weight.dim() == 3 else 1.0)
    assert num_weights(config) == expected


@pytest.mark.parametrize("name", ["nemotron_h_moe", "qwen35_moe", "granite_moe"])
def test_several_tokens_meet_the_experts_that_any_of_them_chooses(name: str, load_family):
    config = load_family(name).model.config
    E, k = config.moe.num_experts, config.moe.experts_per_token
    num_tokens, all_tokens = 3, 1000
    assert num_weights_met(config, 1) == pytest.approx(num_weights(config))
    per_expert = (num_weights_met(config, all_tokens) - num_weights(config)) / (E - k)
    chosen = torch.rand(5000, num_tokens, E, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :k]
    reached = torch.zeros(5000, E).scatter_(1, chosen.flatten(1), 1.0).sum(1).mean().item()
    assert num_weights_met(config, num_tokens) == pytest.approx(
        num_weights(config) + (reached - k) * per_expert, rel=0.01
    )


def test_tokens_of_a_dense_model_meet_the_same_weights(load_family):
    config = load_family("granite").model.config
    assert num_weights_met(config, 64) == num_weights(config)
