"""Weights that a token is multiplied by, against the matrices that transformers makes for the same config."""

import pytest

from headrace.models.flops import num_weights


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
