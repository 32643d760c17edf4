"""Names and fields of single families' checkpoints: those of the hub beside transformers' own, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.models.config import GatedDeltaConfig, Mamba1Config, ModelError
from headrace.models.weights import load_config, load_model
from tests.support.engine.checkpoint_edits import edit_config, edit_tensors, logits_of
from tests.support.engine.tiny_checkpoints import (
    build_model,
    olmo_hybrid_config,
)


@pytest.mark.parametrize("fields", [{"layers_block_type": list("MEM*EM-")}, {"hybrid_override_pattern": "MEM*EM-"}])
def test_nemotrons_layers_come_as_words_or_as_a_pattern(fields: dict, copy_of, load_family):
    path = copy_of("nemotron_h_moe")
    edit_config(path, **{"layers_block_type": None, "num_hidden_layers": 7, **fields})
    assert load_config(path) == load_family("nemotron_h_moe").model.config


def test_nemotron_loads_under_its_local_names_too(copy_of, load_family, prompt):
    path = copy_of("nemotron_h_moe")

    def to_local(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.replace("backbone.", "model.", 1): tensor for name, tensor in tensors.items()}
        return renamed | {"mtp.layers.0.eh_proj.weight": torch.ones(2)}

    edit_tensors(path, to_local)
    tokens = prompt(20)
    assert torch.equal(logits_of(load_model(path), tokens), logits_of(load_family("nemotron_h_moe").model, tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers_block_type": ["linear_attention", "sliding"]}, "layers_block_type 'sliding': only linear_attention"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*Q"}, "hybrid_override_pattern 'Q': only"),
        ({"layers_block_type": None}, "hybrid_override_pattern None: must name the kind of each layer"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 beside 7 of layers_block_type: they must agree"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': only 'relu2' is supported"),
        ({"n_group": 5}, "12 experts in 5 groups: must divide evenly, into two or more each"),
        ({"topk_group": 5}, "5 of 4 groups of experts a token: there are not so many"),
        ({"num_experts_per_tok": 7}, "7 experts a token from 2 groups: these do not have so many"),
        ({"n_shared_experts": 2}, "n_shared_experts=2: only 1 is supported"),
    ],
)
def test_nemotrons_refusals_name_the_field(fields: dict, message: str, copy_of):
    path = copy_of("nemotron_h_moe")
    edit_config(path, **fields)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_config(path)


def split_convolutions(tensors: dict[str, Tensor], sizes: list[int]) -> dict[str, Tensor]:
    """As released checkpoints have them: q, k and v of their own sizes. transformers writes three equal parts."""
    for layer in (0, 1, 3):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in ("q", "k", "v")]
        parts = torch.cat([tensors[name] for name in names]).split(sizes)
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    return tensors


def test_jamba_places_attention_and_experts_by_periods_and_may_have_no_experts(copy_of):
    path = copy_of("jamba")
    edit_config(path, num_hidden_layers=8, attn_layer_period=8, attn_layer_offset=4, mamba_dt_rank="auto")
    config = load_config(path)
    assert [i for i, layer in enumerate(config.layers) if layer.mixer == "attention"] == [4]
    assert [i for i, layer in enumerate(config.layers) if layer.feed_forward == "moe"] == [1, 3, 5, 7]
    assert isinstance(config.state, Mamba1Config) and config.state.dt_rank == 6  # 96 over 16
    edit_config(path, num_experts=1)
    config = load_config(path)
    assert config.moe is None and {layer.feed_forward for layer in config.layers} == {"dense"}
    edit_config(path, attn_layer_offset=8)
    with pytest.raises(ModelError, match="attn_layer_offset 8: must be below attn_layer_period 8"):
        load_config(path)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default", "rope_theta": 5e3}, {"rope_theta": None}])
def test_olmo_hybrid_in_its_released_layout(rope: dict | None, tmp_path: Path, prompt):
    """Keys and values of other sizes, norms of attention layers under their own names, with and without rotation."""
    config = olmo_hybrid_config(linear_key_head_dim=16, linear_value_head_dim=24, rope_parameters=rope)
    oracle, tokens = build_model(config), prompt(40)
    oracle.save_pretrained(tmp_path)
    attention = "model.layers.2.feedforward_layer_norm.weight"

    def to_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.2.post_attention_layernorm.weight"] = tensors.pop(attention)
        return split_convolutions(tensors, [48, 48, 144])

    edit_tensors(tmp_path, to_hub)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), position_ids=torch.arange(40)[None]).logits[0]
    torch.testing.assert_close(logits_of(load_model(tmp_path), tokens), expected, atol=1e-4, rtol=0)


def test_olmo_hybrid_fills_in_its_sizes(copy_of):
    path = copy_of("olmo_hybrid")
    names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "allow_neg_eigval")
    edit_config(path, layer_types=None, **{f"linear_{name}": None for name in names})
    config = load_config(path)
    assert [layer.mixer for layer in config.layers] == ["state", "state", "state", "attention"]
    assert config.state == GatedDeltaConfig(4, 4, 12, 24, 4, beta_scale=2.0)


@pytest.mark.parametrize(
    ("fields", "rotates", "base"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5}, True, 5e5),
        ({"rope_parameters": None}, True, 1e4),
        ({"rope_parameters": {"rope_theta": None}}, False, 1e4),
    ],
)
def test_olmo_hybrid_rotates_unless_the_base_is_null(fields: dict, rotates: bool, base: float, copy_of):
    path = copy_of("olmo_hybrid")
    edit_config(path, **fields)
    attention = load_config(path).attention
    assert (attention.rotary_dim, attention.rope_theta) == (attention.head_dim if rotates else 0, base)


def test_kimi_loads_under_its_hub_names_and_fields_too(copy_of, load_family, prompt):
    path = copy_of("kimi_linear")
    delta = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "num_heads": 3, "head_dim": 24}
    local = dict.fromkeys(("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
    edit_config(path, **local, linear_attn_config=delta | {"short_conv_kernel_size": 4}, mla_use_nope=True)
    assert load_config(path) == load_family("kimi_linear").model.config

    def to_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {re.sub(r"\.[03]\.block_sparse_moe", lambda m: m[0][:3] + "mlp", n): t for n, t in tensors.items()}

    edit_tensors(path, to_hub)
    tokens = prompt(20)
    assert torch.equal(logits_of(load_model(path), tokens), logits_of(load_family("kimi_linear").model, tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": 24}, "q_lora_rank=24: only None is supported"),
        ({"mla_use_nope": False}, "mla_use_nope=False: only True is supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: only 4 is supported"),
        ({"linear_attn_config": [1]}, "linear_attn_config [1]: must be an object"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types ['dense']: must be a list of 4 of dense and sparse"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]}},
            "layer 4 is in both or none of full_attn_layers and kda_layers",
        ),
    ],
)
def test_kimis_refusals_name_the_field(fields: dict, message: str, copy_of):
    path = copy_of("kimi_linear")
    edit_config(path, **fields)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_config(path)
