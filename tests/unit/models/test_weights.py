"""Loading checkpoints: local and hub layouts, shards, and clear refusals."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BambaConfig

from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.config import GatedDeltaConfig, Mamba1Config, ModelError, UnsupportedModel
from headrace.models.model import HybridModel
from headrace.models.weights import load_config, load_model
from tests.support.engine.tiny_checkpoints import (
    build_model,
    common_fields,
    load_oracle,
    make_checkpoint,
    olmo_hybrid_config,
)


def edit_config(path: Path, **fields: object) -> dict:
    config = {**json.loads((path / "config.json").read_text()), **fields}
    (path / "config.json").write_text(json.dumps(config))
    return config


def edit_tensors(path: Path, edit) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(edit(tensors), path / "model.safetensors", metadata={"format": "pt"})


def logits_of(model: HybridModel, tokens: list[int]) -> Tensor:
    num_blocks = -(-len(tokens) // 16)
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16), num_blocks, 1))
    return runner.forward([SequenceInput(tokens, 0, range(num_blocks), None, 0, num_logits=len(tokens))])


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
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False"),
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
