"""FP8 checkpoints in every published layout, FP8 made at load, and refusals by name."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.kernels.dense.fp8 import FP8, Fp8Matrix, quantise_matrix
from headrace.models.branches import FeedForwardBranch
from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.layers.feed_forward import MixtureOfExperts
from headrace.models.model import HybridModel
from headrace.models.quantisation import QuantisedFiles
from headrace.models.weights import load_config, load_model
from tests.support.engine.checkpoint_edits import logits_of
from tests.support.engine.fp8_checkpoints import compressed_tensors, quantise_checkpoint, write_config
from tests.support.engine.tiny_checkpoints import load_oracle


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen35", "fp8 blocks"),
        ("qwen3_next", "fp8 blocks"),
        ("granite", "channels"),
        ("jamba", "channels"),
        ("nemotron_h_moe", "blocks"),
        ("falcon_h1", "channels"),
        ("lfm2", "tensor"),
        ("nemotron_h", "modelopt"),
        ("olmo_hybrid", "modelopt blocks"),
        ("kimi_linear", "fp8 blocks"),
    ],
)
def test_logits_are_those_of_the_dequantised_weights(family: str, form: str, copy_of, prompt):
    oracle = load_oracle(quantise_checkpoint(copy_of(family, "plain"), form, dequantised=True))
    model = load_model(quantise_checkpoint(copy_of(family), form, dequantised=False))
    tokens = prompt(40)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), position_ids=torch.arange(len(tokens))[None]).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), expected, atol=1e-4, rtol=0)


def test_matrices_stay_in_fp8_and_other_tensors_do_not(copy_of):
    path = quantise_checkpoint(copy_of("granite"), "channels", dequantised=False)
    stored, files = load_file(path / "model.safetensors"), QuantisedFiles(path, torch.bfloat16, torch.device("cpu"))
    name = "model.layers.3.mamba.out_proj.weight"
    matrix = files.matrix(name, tuple(stored[name].shape))
    assert isinstance(matrix, Fp8Matrix) and matrix.dtype == torch.bfloat16
    assert torch.equal(matrix.values.view(torch.uint8), stored[name].view(torch.uint8))
    assert torch.equal(matrix.scales, stored["model.layers.3.mamba.out_proj.weight_scale"])
    embedding = "model.embed_tokens.weight"
    assert files.matrix(embedding, tuple(stored[embedding].shape)).dtype == torch.bfloat16


def test_a_file_of_modelopt_beside_the_config_counts(copy_of):
    path = copy_of("granite")
    (path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}'
    )
    with pytest.raises(UnsupportedModel, match="modelopt's 'NVFP4'"):
        load_config(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' of 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "quant_method 'gptq' of 8 bits"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt's 'W4A8_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        (
            compressed_tensors("group", num_bits=4, type="int") | {"format": "pack-quantized"},
            "compressed-tensors' 'pack-quantized': int4 by group",
        ),
        (
            compressed_tensors("tensor_group", num_bits=4) | {"format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized': float4",
        ),
        (compressed_tensors("channel", type="int"), "int8 by channel"),
        (compressed_tensors("block", block_structure=[64, 128]), "block_structure [64, 128]"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused_by_name(config: dict, message: str, copy_of):
    path = copy_of("granite")
    write_config(path, config)
    with pytest.raises(UnsupportedModel, match=f"{re.escape(message)}.*only fp8 per tensor"):
        load_config(path)


@pytest.mark.parametrize(
    ("edited", "message"), [(None, "needs one of weight_scale_inv"), (torch.ones(3, 2), r"weight_scale is \[3, 2\]")]
)
def test_scales_that_are_missing_or_misshapen_are_named(edited, message: str, copy_of):
    path = quantise_checkpoint(copy_of("granite"), "tensor", dequantised=False)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mamba.in_proj.weight_scale"
    tensors |= {name: edited} if edited is not None else {}
    if edited is None:
        del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_weights_quantised_at_load_have_a_fingerprint_of_their_own(load_family, prompt):
    family = load_family("granite")
    quantised = load_model(family.path, quantization="fp8")
    assert quantised.fingerprint != family.model.fingerprint
    difference = (logits_of(quantised, prompt(20)) - family.oracle_logits(prompt(20))).abs().max()
    assert 1e-4 < difference < 0.5  # rounded weights, not others


@pytest.mark.parametrize("family", ["granite_moe", "qwen35_moe"])
def test_experts_are_quantised_at_load_too(family: str, load_family):
    plain = load_family(family).model
    quantised = load_model(load_family(family).path, quantization="fp8")
    for before, after in zip(mixtures_of(plain), mixtures_of(quantised), strict=True):
        for experts, rounded in ((before.up, after.up), (before.down, after.down)):
            expected = quantise_matrix(experts.flatten(0, 1)).dequantised().view(experts.shape)
            assert torch.equal(rounded, expected)


def mixtures_of(model: HybridModel) -> list[MixtureOfExperts]:
    feed_forwards = [branch.feed_forward for branch in model.chain.branches if isinstance(branch, FeedForwardBranch)]
    mixtures = [each for each in feed_forwards if isinstance(each, MixtureOfExperts)]
    assert mixtures
    return mixtures


def test_a_checkpoint_in_fp8_is_not_quantised_again(copy_of):
    path = quantise_checkpoint(copy_of("granite"), "tensor", dequantised=False)
    with pytest.raises(ModelError, match=r"is in FP8 already.*leave quantization out"):
        load_model(path, quantization="fp8")


def test_stacked_experts_in_fp8_are_refused(copy_of):
    path = quantise_checkpoint(copy_of("granite_moe"), "tensor", dequantised=False)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    save_file(tensors | {name: tensors[name].to(FP8)}, path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="is FP8: give a checkpoint with a matrix for each expert"):
        load_model(path)
