"""FP8 weights of a model: which checkpoints can be read, their tensors and scales, and FP8 made of other weights.

A tensor in FP8 (e4m3) has its scales beside it, and their shape says what each is for: one for the matrix, one for
each row, or one for each block of 128 x 128. Recipes leave parts of a model out: those are stored like unquantised
ones. Scales of activations are not read: each row of activations gets its own when it is multiplied. Neither are those
of keys and values, which are cached in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, Matrix, quantise_matrix
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.moe.experts import Experts, experts_of
from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.raw_config import RawConfig, shown
from headrace.models.weight_files import WeightFiles, WeightSource

SUPPORTED = "fp8 per tensor, per channel and in blocks of [128, 128], by fp8, compressed-tensors or modelopt"
SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # both multiply, whatever the first one says
UNREAD = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


def is_quantised(raw: RawConfig) -> bool:
    """True if the config says that weights are in a form of FP8 that can be read.

    Raises UnsupportedModel, with the name of the format, if they are in another.
    """
    given = raw.get("quantization_config", None)
    if given is None:
        return False
    if not isinstance(given, dict):
        raise ModelError(f"quantization_config {shown(given)}: must be an object")
    for format_name in _unsupported(given):
        raise UnsupportedModel(f"{raw.architecture} in {format_name}: only {SUPPORTED}, can be read")
    return True


def _unsupported(given: Mapping[str, Any]) -> Iterator[str]:
    """Names of formats that cannot be read."""
    method = given.get("quant_method", given.get("producer"))
    if isinstance(method, dict):  # modelopt's own file
        method = method.get("name")
    match method:
        case "fp8":
            block = given.get("weight_block_size")
            if block is not None and block != [BLOCK, BLOCK]:
                yield f"fp8 with weight_block_size {shown(block)}"
            if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
                yield f"fp8 with fmt {shown(given['fmt'])}"
        case "compressed-tensors":
            yield from _unsupported_groups(given)
        case "modelopt":
            inner = given.get("quantization", given)
            algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
            if algorithm not in MODELOPT_ALGORITHMS:
                yield f"modelopt's {shown(algorithm)}"
        case _:
            bits = given.get("bits", given.get("w_bit"))
            yield f"quant_method {shown(method)}" + ("" if bits is None else f" of {shown(bits)} bits")


def _unsupported_groups(given: Mapping[str, Any]) -> Iterator[str]:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield f"compressed-tensors with config_groups {shown(groups)}"
        return
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            yield f"compressed-tensors with weights {shown(weights)}"
            continue
        stored, kind = given.get("format"), f"{weights.get('type')}{weights.get('num_bits')}"
        block = weights.get("block_structure")
        if kind != "float8" or weights.get("strategy") not in ("tensor", "channel", "block"):
            yield f"compressed-tensors' {shown(stored)}: {kind} by {weights.get('strategy')}"
        elif weights["strategy"] == "block" and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            yield f"compressed-tensors' {shown(stored)} with block_structure {shown(block)}"


class QuantisedFiles(WeightFiles):
    """The tensors of a checkpoint in FP8: matrices stay as they are, all else is dequantised."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._remaining = {n: stored for n, stored in self._remaining.items() if not n.endswith(UNREAD)}
        self._has_fp8 = False

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        stored = self._read(name, shape)
        if stored.dtype != torch.float8_e4m3fn:
            return self._cast(stored, name, dtype)
        return self._with_scales(name, stored, dtype or self._dtype).dequantised()

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        stored = self._read(name, shape)
        if stored.dtype != torch.float8_e4m3fn:
            return self._cast(stored, name, None)
        return self._with_scales(name, stored, self._dtype)

    def assert_all_taken(self) -> None:
        super().assert_all_taken()
        if not self._has_fp8:
            raise ModelError(
                f"{self.path}: config.json has a quantization_config, but no weight is FP8: give the weights that it "
                "describes, or remove it"
            )

    def _with_scales(self, name: str, values: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        self._has_fp8 = True
        if values.dim() != 2:
            shape = list(values.shape)
            raise UnsupportedModel(
                f"{self.path}: {name} {shape} is FP8: give a checkpoint with a matrix for each expert"
            )
        layer = name.removesuffix(".weight")
        found = [f"{layer}.{scale}" for scale in SCALE_NAMES if f"{layer}.{scale}" in self.remaining]
        if len(found) != 1:
            raise ModelError(f"{self.path}: {name} {list(values.shape)} is FP8: needs one of {', '.join(SCALE_NAMES)}")
        scales = self._read(found[0], None).float()
        if scales.dim() == 4:  # ModelOpt's blocks: [rows, 1, columns, 1]
            scales = scales[:, 0, :, 0]
        rows, columns = values.shape
        if scales.numel() == 1:
            return Fp8Matrix(values, scales.view(1, 1).expand(rows, 1).contiguous(), 1, dtype)
        if scales.shape in ((rows,), (rows, 1)):
            return Fp8Matrix(values, scales.view(rows, 1), 1, dtype)
        blocks = (cdiv(rows, BLOCK), cdiv(columns, BLOCK))
        if scales.shape != blocks:
            given, wanted = list(scales.shape), f"[1], [{rows}, 1] or {list(blocks)}"
            raise ModelError(f"{self.path}: {found[0]} is {given}: for {[rows, columns]} it must be {wanted}")
        return Fp8Matrix(values, scales.contiguous(), BLOCK, dtype)


@dataclass(frozen=True)
class QuantisedAtLoad:
    """Weights whose matrices are quantised as they are taken, unless they are in FP8 already."""

    weights: WeightSource

    @property
    def remaining(self) -> Set[str]:
        return self.weights.remaining

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self.weights.take(name, shape, dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        matrix = self.weights.matrix(name, shape)
        return matrix if isinstance(matrix, Fp8Matrix) else quantise_matrix(matrix)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        stacked = self.weights.take(name, shape)
        return experts_of(quantise_matrix(stacked.flatten(0, 1)), shape[0])

    def skip(self, *prefixes: str) -> None:
        self.weights.skip(*prefixes)

    def assert_all_taken(self) -> None:
        self.weights.assert_all_taken()


def quantised_fingerprint(fingerprint: str, quantization: str) -> str:
    """The fingerprint of weights that were quantised at load: what is cached is not that of the original's."""
    return blake3(f"{quantization}/{fingerprint}".encode()).hexdigest()
