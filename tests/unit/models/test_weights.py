"""Loading checkpoints: local and hub layouts, shards, and clear refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BambaConfig

from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.weights import load_config, load_model
from tests.support.engine.checkpoint_edits import edit_config, edit_tensors, logits_of
from tests.support.engine.tiny_checkpoints import (
    build_model,
    common_fields,
    load_oracle,
    make_checkpoint,
)


def test_config_says_what_the_cache_needs(family):
    config = load_config(family.path)
    layout = family.model.cache_layout(block_size=16)
    assert (config.vocab_size, config.max_position, config.eos_token_ids) == (
        family.oracle.config.vocab_size,
        4096,
        (0, 2),
    )
    assert [group.num_layers for group in (*layout.attention_groups, *layout.state_groups)] == (
        [4, 4] if family.name == "falcon_h1" else [1, 3]  # its layers have both
    )
    assert (layout.dtype, layout.state_dtype, layout.block_size) == ("float32", "float32", 16)
    assert layout.fingerprint == family.model.fingerprint


def test_the_hub_names_of_lfm2_mean_the_same(copy_of, load_family):
    """The first releases' field names: indices of attention layers, block_ff_dim, tie_embedding, rope_theta outside."""
    path = copy_of("lfm2")
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings", "intermediate_size"):
        config.pop(name)
    hub = {"full_attn_idxs": [2], "block_ff_dim": 200, "tie_embedding": True, "rope_theta": 1000000.0}
    file.write_text(json.dumps(config | hub))
    assert load_config(path) == load_family("lfm2").model.config


@pytest.mark.parametrize("name", ["qwen35", "qwen35_moe"])
def test_hub_layout_of_the_multimodal_wrapper(name: str, copy_of, load_family, prompt):
    """Nested text_config, the text model one level deeper, vision and multi-token-prediction parts beside it."""
    path = copy_of(name)
    config = json.loads((path / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    wrapper = {
        "architectures": [architecture],
        "tie_word_embeddings": config.pop("tie_word_embeddings"),
        "text_config": config,
        "vision_config": {"hidden_size": 1, "num_attention_heads": 1},
    }
    (path / "config.json").write_text(json.dumps(wrapper))

    def to_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
        extra = {"mtp.fc.weight": torch.ones(2), "model.visual.patch_embed.weight": torch.ones(3)}
        return renamed | extra

    edit_tensors(path, to_hub)
    tokens = prompt(40)
    assert torch.equal(logits_of(load_model(path), tokens), logits_of(load_family(name).model, tokens))


@pytest.mark.parametrize("name", ["granite", "qwen35"])
def test_hub_words_for_layer_types(name: str, copy_of, load_family):
    path = copy_of(name)
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    listed = edit_config(path)["layer_types"]
    edit_config(path, layer_types=[words[word] for word in listed])
    assert load_config(path).layers == load_family(name).model.config.layers


def test_granite_hub_names_layers_block_type(copy_of, load_family):
    path = copy_of("granite")
    edit_config(path, layers_block_type=["mamba", "mamba", "attention", "mamba"], layer_types=None)
    assert load_config(path).layers == load_family("granite").model.config.layers


def test_qwen_without_layer_types_repeats_every_fourth(copy_of):
    path = copy_of("qwen35")
    edit_config(path, layer_types=None)
    assert [layer.mixer for layer in load_config(path).layers] == ["state", "state", "state", "attention"]


def test_older_field_names_of_rotation(copy_of, load_family):
    path = copy_of("qwen3_next")
    edit_config(path, rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.25)
    assert load_config(path) == load_family("qwen3_next").model.config


def test_shards_with_an_index(copy_of, load_family, prompt):
    path = copy_of("qwen35_moe")
    tensors = load_file(path / "model.safetensors")
    weight_map = {}
    for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{i}-of-2.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokens = prompt(20)
    assert torch.equal(logits_of(load_model(path), tokens), logits_of(load_family("qwen35_moe").model, tokens))


def test_stacked_experts_load_like_separate_ones(copy_of, load_family, prompt):
    path = copy_of("qwen35_moe")

    def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for i in range(4):
            base = f"model.layers.{i}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{base}.{e}.{part}_proj.weight") for e in range(6)])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{base}.gate_up_proj": torch.cat((gate, up), 1), f"{base}.down_proj": down}
        return tensors

    edit_tensors(path, stack)
    tokens = prompt(20)
    assert torch.equal(logits_of(load_model(path), tokens), logits_of(load_family("qwen35_moe").model, tokens))


def test_bamba_equals_transformers(tmp_path: Path, prompt):
    config = BambaConfig(
        **common_fields(),
        intermediate_size=96,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
    )
    build_model(config).save_pretrained(tmp_path)
    tokens = prompt(70)
    with torch.inference_mode():
        positions = torch.arange(len(tokens))[None]
        expected = load_oracle(tmp_path)(torch.tensor([tokens]), position_ids=positions).logits[0]
    torch.testing.assert_close(logits_of(load_model(tmp_path), tokens), expected, atol=1e-4, rtol=0)


def test_unknown_architecture_is_refused_with_the_supported_list(copy_of):
    path = copy_of("granite")
    edit_config(path, architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*GraniteMoeHybridForCausalLM.*Qwen3_5ForCausalLM"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("granite", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("granite", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("granite", {"position_embedding_type": "alibi"}, "alibi"),
        ("granite", {"attention_bias": True}, "attention_bias=True"),
        ("granite", {"layer_types": ["mamba", "sliding_attention"]}, "sliding_attention"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias=True"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("jamba", {"sliding_window": 64}, "sliding_window=64"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False"),
        ("kimi_linear", {"attention_bias": True}, "attention_bias=True"),
        ("lfm2", {"conv_bias": True}, "conv_bias=True"),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias=True"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window=64"),
        ("olmo_hybrid", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
        ("qwen35", {"attention_bias": True}, "attention_bias=True"),
        ("qwen35", {"layer_types": ["linear_attention", "sliding_attention"]}, "sliding_attention"),
        (
            "qwen35",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope type 'longrope': only default",
        ),
    ],
)
def test_options_that_are_not_implemented_are_refused(name: str, fields: dict, message: str, copy_of):
    path = copy_of(name)
    edit_config(path, **fields)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(path)


@pytest.mark.parametrize("kind", ["attention", "mamba"])
def test_models_with_one_kind_of_layer_are_refused(kind: str, copy_of):
    path = copy_of("granite")
    edit_config(path, layer_types=[kind] * 4)
    with pytest.raises(ModelError, match="only hybrids are supported, which have both"):
        load_config(path)


def test_missing_tensor_is_named(copy_of):
    path, name = copy_of("granite"), "model.layers.1.mamba.dt_bias"
    edit_tensors(path, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        load_model(path)


def test_unexpected_tensor_is_named(copy_of):
    path = copy_of("qwen35")
    edit_tensors(path, lambda tensors: tensors | {"model.layers.0.self_attn.sinks": torch.ones(2)})
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.sinks"):
        load_model(path)


def test_misshapen_tensor_is_named_with_both_shapes(copy_of):
    path = copy_of("granite")
    edit_config(path, shared_intermediate_size=100)
    with pytest.raises(ModelError, match=r"input_linear\.weight is \[192, 64\], the config says \[200, 64\]"):
        load_model(path)


def test_missing_config_field_is_named(copy_of):
    path = copy_of("granite")
    config = json.loads((path / "config.json").read_text())
    del config["mamba_d_state"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no 'mamba_d_state'"):
        load_model(path)


def test_missing_weights_and_config_are_named(copy_of):
    path = copy_of("granite")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors missing"):
        load_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(path)


def test_fingerprint_tells_finetunes_apart(tmp_path: Path, load_family, copy_of):
    original = load_family("granite").model.fingerprint
    same = copy_of("granite")
    assert load_model(same).fingerprint == original
    assert load_model(make_checkpoint(tmp_path / "other", "granite", seed=2)).fingerprint != original
    name = "model.layers.3.mamba.out_proj.weight"
    edit_tensors(same, lambda tensors: tensors | {name: tensors[name] * 1.001})
    assert load_model(same).fingerprint != original


def test_fingerprint_covers_the_config(copy_of, load_family):
    path = copy_of("granite")
    edit_config(path, residual_multiplier=0.81)
    assert load_model(path).fingerprint != load_family("granite").model.fingerprint


def test_a_field_that_changes_nothing_keeps_the_fingerprint(copy_of, load_family):
    path = copy_of("granite")
    edit_config(path, transformers_version="4.0", use_cache=False)
    assert load_model(path).fingerprint == load_family("granite").model.fingerprint
