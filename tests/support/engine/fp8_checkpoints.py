"""FP8 checkpoints made of plain ones, in the layouts that are published, and what their values are."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, FP8
from headrace.kernels.lib.sizes import cdiv

MATRICES = re.compile(r"layers\.\d+\..*(?<!in_proj_[ab])(?<!in_proj_ba)(?<=proj|near)(_\w+)?\.weight$")  # as recipes do


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True, "num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "channels": compressed_tensors("channel"),
    "blocks": compressed_tensors("block", block_structure=[BLOCK, BLOCK]),
    "tensor": compressed_tensors("tensor"),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "modelopt blocks": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]},
}


def quantise_checkpoint(folder: Path, form: str, *, dequantised: bool) -> Path:
    """Quantises matrices of the checkpoint in `folder`, where it lies.

    dequantised   store the values that the quantised matrices stand for, without scales
    """
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not MATRICES.search(name):
            stored[name] = tensor
            continue
        values, scales = _quantise(tensor, form)
        layer = name.removesuffix(".weight")
        if dequantised:
            stored[name] = values.float() * _spread(scales, tensor.shape)
            continue
        stored[name] = values
        name_of_scales = f"{layer}.weight_scale{'_inv' if form == 'fp8 blocks' else ''}"
        stored[name_of_scales] = scales[:, None, :, None].clone() if form == "modelopt blocks" else scales
        if form == "modelopt":
            stored[f"{layer}.input_scale"] = torch.tensor(0.02)
            if layer.endswith("k_proj"):
                stored[f"{layer}.k_scale"] = torch.tensor(1.0)
    assert len(stored) > len(tensors) or dequantised
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if not dequantised:
        write_config(folder, CONFIGS[form])
    return folder


def write_config(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def _quantise(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    if form in ("tensor", "modelopt"):
        scales = weight.abs().amax() / 400  # a scale need not come from the largest value
    elif form == "channels":
        scales = weight.abs().amax(1, keepdim=True) / 448
    else:
        scales = torch.empty(cdiv(rows, BLOCK), cdiv(columns, BLOCK), dtype=torch.bfloat16)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                scales[i, j] = block.abs().amax() / 400
    return (weight / _spread(scales, weight.shape)).to(FP8), scales


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    scales = scales.float()
    if scales.dim() < 2 or scales.shape == (shape[0], 1):
        return scales
    return scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
